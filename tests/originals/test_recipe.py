"""The AMP recipe: default precision, region, region and scaler, clipping, one switch, save and resume, inference."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from tests.originals.libraries import PRECISIONS, Library, batches, check_same, make_model, weights
from tests.saved import through_a_file
from torch import nn

WIDTH, LAYERS, EPOCHS = 16, 3, 3
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
low_precision = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Timer:
    """The two functions around each trial of the recipe: collect garbage, note the time, tell how long it took."""

    def start(self) -> None:
        gc.collect()
        self.begin = time.time()

    def end_and_print(self, message: str) -> None:
        print(f"\n{message}\nTotal execution time = {time.time() - self.begin:.3f} sec")


def trial() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = make_model(WIDTH, WIDTH, LAYERS)
    return net, torch.optim.SGD(net.parameters(), lr=0.001)


@low_precision
def test_the_region_alone(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        (net, opt), timer, loss_fn, losses = trial(), Timer(), nn.MSELoss(), []
        timer.start()
        for _ in range(EPOCHS):
            for input, target in batches():
                with library.autocast(device_type="cpu", dtype=region["dtype"]):
                    output = net(input)
                    assert output.dtype is region["dtype"]
                    loss = loss_fn(output, target)
                    assert loss.dtype is torch.float32
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.detach())
        timer.end_and_print("Region only:")
        return losses, weights(net)

    check_same(program, precision)
    assert capsys.readouterr().out.count("Total execution time") == 2


@every_precision
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
def test_region_and_scaler_with_one_switch(precision: str, clip: bool) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        (net, opt), loss_fn = trial(), nn.MSELoss()
        scaler = library.GradScaler("cpu", enabled=region["enabled"])
        norms = []
        for _ in range(EPOCHS):
            for input, target in batches():
                with library.autocast("cpu", **region):
                    output = net(input)
                    loss = loss_fn(output, target)
                scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(opt)
                    norms.append(nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1))
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        return weights(net), norms, scaler.get_scale()

    check_same(program, precision)


def train(library: Library, region: dict[str, Any], parts: dict[str, Any], steps: int) -> None:
    for input, target in batches(steps):
        with library.autocast("cpu", **region):
            loss = nn.functional.mse_loss(parts["model"](input), target)
        parts["scaler"].scale(loss).backward()
        parts["scaler"].step(parts["optimizer"])
        parts["scaler"].update()
        parts["optimizer"].zero_grad()


def fresh(library: Library, enabled: bool) -> dict[str, Any]:
    net = make_model(WIDTH, WIDTH, LAYERS)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return {"model": net, "optimizer": opt, "scaler": library.GradScaler("cpu", growth_interval=3, enabled=enabled)}


@every_precision
@pytest.mark.parametrize("then", PRECISIONS)
def test_save_and_resume_with_and_without_amp(precision: str, then: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        before = fresh(library, region["enabled"])
        train(library, region, before, 5)
        checkpoint = through_a_file({name: part.state_dict() for name, part in before.items()})
        after = fresh(library, PRECISIONS[then]["enabled"])
        for name in ("model", "optimizer"):
            after[name].load_state_dict(checkpoint[name])
        if region["enabled"] and PRECISIONS[then]["enabled"]:  # else a fresh scaler, or none
            after["scaler"].load_state_dict(checkpoint["scaler"])
        train(library, PRECISIONS[then], after, 5)
        return weights(after["model"]), after["scaler"].get_scale()

    check_same(program, precision)


@every_precision
def test_inference_and_evaluation_need_the_region_alone(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        net = make_model(WIDTH, 4, LAYERS).eval()
        with torch.no_grad(), library.autocast("cpu", **region):
            outputs = [net(input) for input, _ in batches()]
        return outputs, [output.argmax(-1) for output in outputs]

    check_same(program, precision)
