"""What a notebook shows of a stepper, a result and a report: tables, and nothing that breaks the page."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from torch import nn

import mezzo


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def prepared() -> mezzo.Stepper:
    model = nn.Sequential(nn.Linear(4, 2))
    return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, output=fp32, scaling.init_scale=8")


def test_a_stepper_says_what_it_steps_and_what_it_did() -> None:
    amp = prepared()
    amp.backward(amp.model(torch.ones(2, 4)).sum())
    amp.step()
    assert repr(amp).startswith("Stepper(Sequential, SGD, policy='fp16, output=fp32") or "policy='fp16" in repr(amp)
    assert repr(amp).endswith(": 1 step taken, 0 skipped, loss scale 8)")


def test_views_are_well_formed_and_show_what_text_shows() -> None:
    amp = prepared()
    amp.backward(amp.model(torch.ones(2, 4)).sum())
    result = amp.step()
    for view in (amp, result, amp.report()):
        page = Tags(view._repr_html_())
        assert page.open == []
    cells = Tags(amp.report()._repr_html_()).texts
    assert all(word in cells for row in str(amp.report()).splitlines()[1:-1] for word in row.split("  ")[0:1] if word)


def test_names_from_outside_are_escaped() -> None:
    class Odd(nn.Linear):
        pass

    Odd.__name__ = "<b>"
    model = Odd(2, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    assert "<b>" not in amp._repr_html_() and "&lt;b&gt;" in amp._repr_html_()
