"""Buffers: a skipped step takes back what its own forward wrote, of every dtype and shape, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.step.step_models import INF
from torch import Tensor, nn

import mezzo


class Counting(nn.Module):
    """A layer whose forward writes buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stats = nn.BatchNorm1d(4)
        self.register_buffer("initialized", torch.tensor(False))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("bytes", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("assigned", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(0, 4))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.initialized.fill_(True)
            self.flags[0] = True
            self.counts += 1
            self.bytes.add_(1)
            self.phase.mul_(1j).add_(1)
            self.running.lerp_(x.detach().mean(0), 0.1)
            self.assigned = self.assigned * 0.9 + x.detach().mean(0)
            self.queue = torch.cat([self.queue, x.detach()])
            self.late = x.detach().mean(0)
        return self.stats(self.linear(x))


def copy_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{prefix}.{name}": None if buffer is None else buffer.detach().clone()
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


def assert_equal(model: nn.Module, want: dict[str, Tensor | None]) -> None:
    now = copy_of(model)
    assert now.keys() == want.keys()
    for name, was in want.items():
        is_now = now[name]
        same = is_now is None if was is None else is_now is not None and torch.equal(is_now, was)
        assert same, f"{name}: {was} became {is_now}"


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "host": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "device": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}


@pytest.fixture(params=OPTIMIZERS)
def run(request: pytest.FixtureRequest) -> tuple[nn.Module, mezzo.Stepper]:
    model = Counting()
    return model, mezzo.prepare(model, OPTIMIZERS[request.param](model), "fp32")


Run = tuple[nn.Module, mezzo.Stepper]


def good() -> Tensor:
    return torch.randn(8, 4)


def bad() -> Tensor:
    return torch.full((8, 4), INF)


def step(run: Run, x: Tensor) -> mezzo.StepResult:
    model, amp = run
    amp.zero_grad()
    amp.backward(model(x).square().mean())
    return amp.step()


class TestEveryKind:
    def test_a_skipped_step_leaves_no_trace(self, run: Run) -> None:
        assert step(run, good())
        before = copy_of(run[0])
        assert not step(run, bad())
        assert_equal(run[0], before)
        assert step(run, good())

    def test_the_first_step_too(self, run: Run) -> None:
        before = copy_of(run[0])
        assert not step(run, bad())
        assert_equal(run[0], before)

    def test_a_step_that_was_taken_keeps_them(self, run: Run) -> None:
        assert step(run, good())
        assert bool(run[0].initialized) and len(run[0].queue) == 8 and int(run[0].counts[0]) == 1

    def test_micro_batches_and_several_forwards(self, run: Run) -> None:
        model, amp = run
        assert step(run, good())
        before = copy_of(model)
        amp.zero_grad()
        amp.backward((model(good()) + model(good())).square().mean())
        amp.backward(model(bad()).square().mean())
        assert not amp.step()
        assert_equal(model, before)


SILENT: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "data in place": lambda model, x: model.running.data.mul_(0.9).add_(x.mean()),
    "data anew": lambda model, x: setattr(model.running, "data", model.running.data + x.mean()),
    "numpy": lambda model, x: model.running.numpy().__iadd__(float(x.mean())),
    "sparse": lambda model, x: setattr(model, "late", torch.eye(3).to_sparse() * x.mean()),
}


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=16"])
@pytest.mark.parametrize("kind", SILENT)
def test_writes_that_move_no_version(kind: str, policy: str) -> None:
    class Silent(Counting):
        def forward(self, x: Tensor) -> Tensor:
            SILENT[kind](self, x.detach())
            return self.linear(x)

    model = Silent()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), f"{policy}, guard.patience=100")
    for x in (bad(), good(), bad()):
        before = {name: None if b is None else b.to_dense().clone() for name, b in model._buffers.items()}
        amp.zero_grad()
        amp.backward(model(x).square().mean())
        is_applied = bool(amp.step())
        after = {name: None if b is None else b.to_dense() for name, b in model._buffers.items()}
        if not is_applied:
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert is_applied is bool(x.isfinite().all())


class TestNobodysStep:
    def test_loading_after_an_evaluation_with_gradients_on(self, run: Run) -> None:
        model, _ = run
        step(run, good())
        keep = {key: value.clone() for key, value in model.state_dict().items()}
        average = {key: torch.ones_like(value) if "running" in key else value for key, value in keep.items()}
        model.load_state_dict(average)
        model.eval()
        model(good())
        model.load_state_dict(keep)
        model.train()
        before = copy_of(model)
        assert not step(run, bad())
        assert_equal(model, before)

    def test_recalibration(self, run: Run) -> None:
        model, _ = run
        step(run, good())
        for _ in range(5):
            model(good() + 3)
        before = copy_of(model)
        assert not step(run, bad())
        assert_equal(model, before)

    def test_recalibration_without_zero_grad(self, run: Run) -> None:
        """The forwards of nobody's loss are told from the step's by the graph."""
        model, amp = run
        step(run, good())
        amp.zero_grad()
        for _ in range(5):
            model(good() + 3)
        before = copy_of(model)
        amp.backward(model(bad()).square().mean())
        assert not amp.step()
        assert_equal(model, before)

    @pytest.mark.parametrize("when", ["after forward", "after backward"])
    def test_a_write_in_the_middle_of_a_step(self, run: Run, when: str) -> None:
        model, amp = run
        step(run, good())
        amp.zero_grad()
        loss = model(bad()).square().mean()
        if when == "after backward":
            amp.backward(loss)
        model.running.fill_(5.0)
        if when == "after forward":  # in torch too, statistics may not be written before backward
            amp.backward(loss)
        model.stats.running_mean.fill_(5.0)
        assert not amp.step()
        assert model.running.eq(5).all() and model.stats.running_mean.eq(5).all()

    def test_a_closed_step_is_not_taken_back(self, run: Run) -> None:
        """zero_grad gave a healthy forward up; the next step does not undo what it wrote."""
        model, amp = run
        amp.backward(model(good()).square().mean())
        amp.zero_grad()
        before = copy_of(model)
        assert not step(run, bad())
        assert_equal(model, before)

    @pytest.mark.parametrize("of_step", [False, True])
    def test_gradients_of_nobodys_step(self, run: Run, of_step: bool) -> None:
        """A forward whose gradients somebody took is over with `zero_grad`; the next step does not undo what it wrote."""
        model, amp = run
        step(run, good())
        (amp.grad if of_step else torch.autograd.grad)(model(good()).square().mean(), list(model.parameters()))
        before = copy_of(model)
        assert not step(run, bad())
        assert_equal(model, before)

    def test_a_forward_without_backward_before_a_backward_that_raises(self, run: Run) -> None:
        """What reached no output is the forward's whose loss it was, and not of those before."""
        model, amp = run
        step(run, good())
        amp.zero_grad()
        model(good())
        amp.zero_grad()
        before = copy_of(model)
        loss = model(bad()).square().mean()

        def raising(grads: tuple[Tensor, ...]) -> None:
            raise ValueError

        assert loss.grad_fn is not None
        loss.grad_fn.register_prehook(raising)
        with pytest.raises(ValueError):
            amp.backward(loss)
        amp.zero_grad()
        assert_equal(model, before)

    def test_gradients_that_the_optimizer_dropped(self, run: Run) -> None:
        model, amp = run
        amp.backward(model(good()).square().mean())
        amp.optimizers[0].zero_grad()
        before = copy_of(model)
        amp.backward(model(bad()).square().mean())
        assert not amp.step()
        assert_equal(model, before)

    def test_inference_mode_that_assigns_a_buffer(self, run: Run) -> None:
        model, _ = run
        step(run, good())
        with torch.inference_mode():
            model(good())
        assert step(run, good())
        before = copy_of(model)
        assert not step(run, bad())
        assert_equal(model, before)


def test_a_checkpoint_that_runs_again_in_backward() -> None:
    """The recompute writes buffers in the middle of backward; that is the step's doing."""

    class Checkpointed(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "fp32")
    before = copy_of(model)
    amp.backward(model(bad()).square().mean())
    assert not amp.step()
    assert_equal(model, before)


def test_a_submodule_called_by_itself() -> None:
    model = Counting()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "fp32")
    amp.backward(model.stats(model.linear(good())).square().mean())
    assert amp.step()
    model.stats.running_mean.fill_(2.0)
    before = copy_of(model)
    amp.zero_grad()
    amp.backward(model.stats(model.linear(bad())).square().mean())
    assert not amp.step()
    assert_equal(model, before)


def test_a_mask_of_minus_infinity_that_forward_builds() -> None:
    """New and grown buffers that hold -inf are meant."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or len(self.mask) < len(x):
                self.mask = torch.full((len(x), len(x)), -INF).triu(1)
            return (self.linear(x) @ self.linear(x).T + self.mask[: len(x), : len(x)]).softmax(-1) @ x

    model = Masked()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    for size in (2, 5, 3):
        amp.zero_grad()
        amp.backward(model(torch.randn(size, 4)).square().mean())
        assert amp.step()


class Edges(nn.Module):
    """A graph network whose edges are a buffer, another one after each forward."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        out = self.edges @ self.layer(x)
        if self.training:
            self.edges = self.edges * 0.5
        return out


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_a_sparse_buffer_is_taken_back_saved_and_counted(layout: torch.layout) -> None:
    model = Edges(layout)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for x, factor in ((torch.ones(4, 4), 0.5), (torch.full((4, 4), INF), 0.5), (torch.ones(4, 4), 0.25)):
        amp.zero_grad()
        amp.backward(model(x).square().mean())
        assert bool(amp.step()) is bool(x.isfinite().all())
        assert torch.equal(model.edges.to_dense(), torch.eye(4).roll(1, 0) * factor)
    saved = amp.state_dict()
    model.edges = model.edges * 0.0
    amp.load_state_dict(saved)
    assert torch.equal(model.edges.to_dense(), torch.eye(4).roll(1, 0) * 0.25)
    assert "buffers" in str(amp.report())
    amp.release()


class Odd(nn.Module):
    """A layer whose forward puts another tensor in place of a buffer."""

    def __init__(self, before: Tensor, after: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("odd", before)
        self.after = [after]

    def forward(self, x: Tensor) -> Tensor:
        self.odd = self.after[0]
        return self.layer(x)


ODD: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fp8": (lambda x: x.to(torch.float8_e4m3fn), lambda x: x.float()),
    "half complex": (lambda x: x.to(torch.complex32), lambda x: x.to(torch.complex64)),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8), lambda x: x.dequantize()),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), lambda x: x.values()),
    "unsigned": (lambda x: x.to(torch.uint32), lambda x: x.long()),
}


@pytest.mark.filterwarnings("ignore")  # torch calls several of them experimental, or old
@pytest.mark.parametrize("kind", ODD)
def test_a_buffer_that_torch_does_not_compare_is_taken_back_too(kind: str) -> None:
    made, read = ODD[kind]
    before, after = torch.arange(4.0), torch.arange(4.0, 8.0)
    model = Odd(made(before), made(after))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for x, want in ((torch.full((4, 4), INF), before), (torch.ones(4, 4), after)):
        amp.zero_grad()
        amp.backward(model(x).square().mean())
        assert bool(amp.step()) is (want is after)
        assert torch.equal(read(model.odd).abs().float().flatten()[:4], want)


@pytest.mark.filterwarnings("ignore")  # torch calls torch.jit old
def test_the_buffers_of_a_scripted_part_are_taken_back_too() -> None:
    norm = torch.jit.script(nn.BatchNorm1d(4))
    model = nn.Sequential(norm, nn.Linear(4, 1))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for x, taken in ((INF, False), (1.0, True)):
        amp.zero_grad()
        before = norm.running_mean.clone()
        amp.backward(model(torch.full((4, 4), x)).square().mean())
        assert bool(amp.step()) is taken
        assert torch.equal(norm.running_mean, before) is not taken
