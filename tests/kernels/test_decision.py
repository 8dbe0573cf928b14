"""The decision of a step beside its rule in words: for every pattern of findings, and clipping beside torch's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mezzo.kernels import decision_slots, num_decided, pack_decision
from mezzo.kernels.ops.decision import decide_

ZERO = torch.zeros(())


def packed(num: int, found: dict[str, list[float]]) -> Tensor:
    given = {"scale": [4.0], "grad_norm": [5.0], "flushed": [0.25], "max_norm": [2.0], "norms": [3.0, 4.0, 1.0][:num]}
    return pack_decision({name: list(torch.tensor(numbers)) for name, numbers in {**found, **given}.items()}, ZERO)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_every_number_has_a_slot_of_its_own(num: int) -> None:
    taken = [index for slot in decision_slots(num).values() for index in range(slot.start, slot.stop)]
    vector = packed(
        num, {key: [0.0] for key in ("early", "elsewhere", "loss_bad", "buffers_bad")} | {"optimizers": [0.0] * num}
    )
    assert sorted(taken) == list(range(len(vector)))
    assert num_decided(vector) == num
    assert vector[decision_slots(num)["norms"]].tolist() == [3.0, 4.0, 1.0][:num]


@pytest.mark.parametrize("together", [True, False], ids=["together", "independent"])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_who_skips_is_the_rule_in_words(num: int, together: bool) -> None:
    for flags in itertools.product([False, True], repeat=4 + num):
        early, elsewhere, loss, buffers, *own = flags
        gradients = early or elsewhere or any(own)
        if together:
            skips = [gradients or loss or buffers] * num
        else:  # a bad loss is everybody's only where it spoilt no gradient
            skips = [one or early or buffers or (loss and not gradients) for one in own]
        bad = [float("nan"), 1.0]  # anything but 0 is a finding
        found = {
            name: [flag * 7.0]
            for name, flag in zip(("early", "elsewhere", "loss_bad"), (early, elsewhere, loss), strict=True)
        }
        found |= {
            "buffers_bad": [bad[0] if buffers else 0.0],
            "optimizers": [bad[k % 2] if one else 0.0 for k, one in enumerate(own)],
        }
        vector, at = packed(num, found), decision_slots(num)
        decide_(vector, num, together=together, clips=False)
        assert vector[at["skipped"]].tolist() == [float(skip) for skip in skips], flags
        assert vector[at["gradients_bad"]].item() == float(gradients), flags
        assert not vector[at["clip_coefs"].start :].any(), "nothing is clipped"


@pytest.mark.parametrize("together", [True, False], ids=["together", "independent"])
def test_clipping_is_that_of_torch(together: bool) -> None:
    num, at = 3, decision_slots(3)
    vector = packed(
        num, {key: [0.0] for key in ("early", "elsewhere", "loss_bad", "buffers_bad")} | {"optimizers": [0.0] * num}
    )
    decide_(vector, num, together=together, clips=True)
    wanted = []
    for norm in [5.0] * num if together else [3.0, 4.0, 1.0]:
        p = torch.nn.Parameter(torch.zeros(1))
        p.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([p], 2.0)
        wanted.append(p.grad / norm)
    torch.testing.assert_close(vector[at["clip_coefs"]], torch.cat(wanted), rtol=2**-22, atol=0.0)
    torch.testing.assert_close(vector[at["divisors"]], 4.0 / vector[at["clip_coefs"]], rtol=2**-23, atol=0.0)
