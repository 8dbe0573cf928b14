"""What the texts say of regions and of the scaler's own calls: decorator, nesting, products, state of the scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.originals.libraries import PRECISIONS, Library, batches, check_same, weights
from torch import Tensor, nn

every_precision = pytest.mark.parametrize("precision", PRECISIONS)


@every_precision
def test_a_region_inside_forward_and_around_it(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(10, 1)

            def forward(self, x: Tensor) -> Tensor:
                with library.autocast("cpu", **region):
                    x = self.linear(x)
                return x

        model = Model()
        with library.autocast("cpu", **region):
            output = model(torch.randn(1, 10))
        loss = output.sum()
        loss.backward()
        return output, loss, [p.grad for p in model.parameters()]

    check_same(program, precision)


@every_precision
def test_a_decorated_forward(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(10, 1)

            @library.autocast("cpu", **region)
            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x)

        return Model()(torch.randn(3, 10))

    check_same(program, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_in_nested_and_disabled_regions(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        a, b, c, d = (torch.rand(8, 8) for _ in range(4))
        with library.autocast("cpu", **region):
            e = torch.mm(a, b)
            f = torch.mm(d, e)  # fp32 and 16 bit together
            with library.autocast("cpu", enabled=False):
                g = torch.mm(c, e.float())
            h = torch.mm(d, g)
        outside = torch.mm(d, f.float())
        assert [t.dtype for t in (e, f, g, h, outside)] == [
            region["dtype"], region["dtype"], torch.float32, region["dtype"], torch.float32,
        ]  # fmt: skip
        return e, f, g, h, outside

    check_same(program, precision)


@every_precision
def test_the_loop_with_a_scheduler(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = library.GradScaler("cpu", enabled=region["enabled"])
        for _ in range(2):
            for dataset, _target in batches():
                optimizer.zero_grad()
                with library.autocast("cpu", **region):
                    loss = nn.functional.cross_entropy(model(dataset), torch.arange(8) % 4)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
        return weights(model), scheduler.get_last_lr()

    check_same(program, precision)


def test_a_new_scale_is_copied_and_factors_can_be_read_and_set() -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        scaler = library.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        p = torch.nn.Parameter(torch.ones(3))
        opt = torch.optim.SGD([p], lr=0.1)
        scales = []
        for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):  # one overflow, then growth
            opt.zero_grad()
            scaler.scale(p.sum() * factor).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        given = torch.tensor(64.0)
        scaler.update(given)
        given.fill_(3.0)
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(7)
        asked = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return scales, scaler.get_scale(), asked, p.detach(), scaler.is_enabled()

    check_same(program, "fp16")
