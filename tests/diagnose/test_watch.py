"""A watch counts exactly, changes nothing, reads nothing between reports, and is gone when closed."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from tests.trace.test_exponents import histogram
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
import mezzo.diagnose as diagnose
from mezzo.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def make(policy: str, lr: float = 1e-2, **options: object) -> tuple[nn.Module, mezzo.Stepper]:
    torch.manual_seed(0)
    model = Net()
    return model, mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), lr=lr, **options), policy=policy)


def train(model: nn.Module, amp: mezzo.Stepper, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        amp.zero_grad()
        amp.backward(model(torch.randn(6, 8, generator=generator)).float().square().mean())
        amp.step()


def test_the_histograms_are_exact() -> None:
    model, amp = make("fp32")
    weights, gradients, outputs = [], [], []
    model.act.register_forward_hook(lambda module, args, out: outputs.append(out.detach().clone()))
    with diagnose.watch(amp, every=1) as w:
        for _ in range(3):
            weights.append(model.a.weight.detach().clone())
            amp.zero_grad()
            amp.backward(model(torch.randn(6, 8)).square().mean())
            gradients.append(model.a.weight.grad.clone())
            amp.step()
    found = {(t.kind, t.name): t.histogram for t in w.report.tensors}
    assert found["weight", "a.weight"] == histogram(torch.stack(weights))
    assert found["gradient", "a.weight"] == histogram(torch.stack(gradients))
    assert found["activation", "act"] == histogram(torch.stack(outputs))


def test_only_some_steps_and_some_values_are_sampled() -> None:
    model, amp = make("bf16")
    with diagnose.watch(amp, every=4, width=10) as w:
        train(model, amp, 11)
    by_name = {(t.kind, t.name): t.histogram for t in w.report.tensors}
    # steps 0, 5 and 10; every 13th of 128 values
    assert sum(by_name["weight", "a.weight"].counts) == 3 * 10
    assert len(w.report.steps) == 11


def test_training_is_bit_equal_and_nothing_is_left() -> None:
    plain, plain_amp = make("fp16, scaling.init_scale=4194304")
    train(plain, plain_amp, 6)
    watched, amp = make("fp16, scaling.init_scale=4194304")
    before = sum(len(m._forward_hooks) for m in watched.modules())
    with diagnose.watch(amp, every=2):
        assert "step" in vars(amp)
        train(watched, amp, 6)
    for (name, a), (_, b) in zip(plain.state_dict().items(), watched.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert not {"step", "backward"} & set(vars(amp))
    assert sum(len(m._forward_hooks) for m in watched.modules()) == before
    plain_hooks = [len(p._post_accumulate_grad_hooks or ()) for p in plain.parameters()]
    assert [len(p._post_accumulate_grad_hooks or ()) for p in watched.parameters()] == plain_hooks


def test_steps_that_are_not_sampled_have_no_hooks() -> None:
    model, amp = make("bf16")
    found = []
    with diagnose.watch(amp, every=3):
        for _ in range(5):
            found.append(sum(len(m._forward_hooks) for m in model.modules()))
            train(model, amp, 1)
    assert found == [3, 0, 0, 0, 3]


def test_the_last_micro_batch_is_the_one_that_is_counted() -> None:
    model, amp = make("fp32")
    outputs = []
    with diagnose.watch(amp, every=1) as w:
        for size in (6, 2):
            outputs.append(model.act(model.a(torch.randn(size, 8))))
            amp.backward(model.b(outputs[-1]).square().mean())
        amp.step()
    found = {(t.kind, t.name): t.histogram for t in w.report.tensors}
    assert found["activation", "act"] == histogram(outputs[-1])


class Reads(TorchDispatchMode):
    """Counts reads by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_between_reports() -> None:
    def reads(watching: bool) -> int:
        model, amp = make("fp16")
        train(model, amp, 1)
        w = diagnose.watch(amp, every=1) if watching else None
        with Reads() as mode:
            train(model, amp, 3)
        if w is not None:
            w.close()
        return mode.count

    assert reads(True) == reads(False)


def test_skips_are_logged_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    model, amp = make("fp16, scaling.init_scale=33554432")
    with diagnose.watch(amp) as w:
        train(model, amp, 6)
    skipped = [s for s in w.report.steps if not s.applied]
    assert skipped and w.report.skipped == len(skipped)
    assert all(s.reason == "gradients" and s.names for s in skipped)
    assert [s.scale for s in skipped] == [33554432 / 2**i for i in range(len(skipped))]
    assert "Skipped steps" in str(w.report)


def test_a_skipped_step_is_not_counted_even_where_results_are_read_right_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["mezzo.diagnose.watch"], "_KEPT_RESULTS", 4)
    model, amp = make("fp16")
    with diagnose.watch(amp, every=1) as w:
        train(model, amp, 3)
        amp.zero_grad()
        amp.backward(model(torch.full((6, 8), torch.inf)).sum())
        assert not amp.step().applied
    assert (w.report.sampled, w.report.skipped) == (3, 1)


def test_the_losses_are_those_of_each_step() -> None:
    model, amp = make("fp32")
    given = []
    with diagnose.watch(amp, every=2) as w:
        for _ in range(3):
            amp.zero_grad()
            for _ in range(2):
                given.append(model(torch.randn(6, 8)).square().mean())
                amp.backward(given[-1])
            amp.step()
    want = [float(a.detach() + b.detach()) for a, b in zip(given[::2], given[1::2], strict=True)]
    assert [s.loss for s in w.report.steps] == pytest.approx(want)


def test_the_loss_of_a_closure_is_its_last() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3), policy="fp32")
    x, given = torch.randn(6, 8), []

    def closure() -> Tensor:
        amp.zero_grad()
        given.append(model(x).square().mean())
        amp.backward(given[-1])
        return given[-1]

    with diagnose.watch(amp) as w:
        amp.step(closure)
    assert len(given) > 1 and w.report.steps[0].loss == float(given[-1].detach())


@pytest.mark.parametrize(
    ("policy", "options", "is_lost"),
    [
        ("fp32", {}, True),
        ("bf16-master", {"master": "split"}, True),
        ("bf16-master, master=fp32", {"master": "fp32"}, True),
        ("bf16-master", {"master": "split", "lr": 1e-5}, False),
        ("bf16-master, master=kahan", {"master": "kahan", "lr": 1e-5}, False),
        ("bf16-master, master=stochastic", {"master": "stochastic", "lr": 1e-5}, False),
        ("fp32", {"lr": 1e-2}, False),
    ],
)
def test_lost_updates_are_those_nothing_keeps(policy: str, options: dict[str, object], is_lost: bool) -> None:
    model, amp = make(policy, **{"lr": 1e-10, **options})
    # one weight that moves, so that the step counts as taken
    model.b.bias.data.zero_()
    with diagnose.watch(amp, every=1) as w:
        train(model, amp, 2)
    lost = {t.name: t.lost for t in w.report.tensors if t.kind == "weight"}
    assert (lost["a.weight"] > 0.5) == is_lost
    assert any("rounded away" in text for text in w.report.warnings) == is_lost


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_group_whose_rate_is_0_is_meant_to_stay(is_prepared: bool) -> None:
    model = Net()
    groups = [{"params": model.a.parameters(), "lr": 0.0}, {"params": model.b.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    run = mezzo.prepare(model, optimizer, "bf16") if is_prepared else model
    with diagnose.watch(run, every=1) as w:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8)).float().square().mean()
            run.backward(loss) if isinstance(run, mezzo.Stepper) else loss.backward()
            run.step() if isinstance(run, mezzo.Stepper) else optimizer.step()
    assert str(w.report.document().verdict).startswith("Healthy"), w.report


def test_an_activation_without_headroom_is_warned_about() -> None:
    model, amp = make("fp16")
    model.a.bias.data.fill_(50000.0)
    with diagnose.watch(amp, every=1) as w:
        amp.backward(model(torch.randn(4, 8)).float().mean() * 1e-6)
        amp.step()
    assert any(text.startswith("output of a: less than one binade") for text in w.report.warnings)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(checkpoint(self.a, x, use_reentrant=False)))


def test_recompute_is_not_counted_twice() -> None:
    model = Checkpointed()
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), policy="bf16")
    with diagnose.watch(amp, every=1) as w:
        train(model, amp, 1)
    found = next(t for t in w.report.tensors if (t.kind, t.name) == ("activation", "a"))
    assert sum(found.histogram.counts) == 6 * 16


@pytest.mark.parametrize("options", [{"every": 0}, {"width": 0}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    _, amp = make("fp32")
    with pytest.raises(ConfigError, match="give whole numbers of at least 1"):
        diagnose.watch(amp, **options)


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype | None = None
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(torch.randn(6, 8, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()


class TestAModelThatIsNotPrepared:
    def test_the_histograms_are_exact(self) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        weights, gradients, outputs = [], [], []
        model.act.register_forward_hook(lambda module, args, out: outputs.append(out.detach().clone()))

        def note(*_: object) -> None:
            weights.append(model.a.weight.detach().clone())
            gradients.append(model.a.weight.grad.clone())

        optimizer.register_step_pre_hook(note)
        with diagnose.watch(model, every=2) as w:
            plain_loop(model, optimizer, 4)
        found = {(t.kind, t.name): t.histogram for t in w.report.tensors}
        assert found["weight", "a.weight"] == histogram(torch.stack(weights[::3]))
        assert found["gradient", "a.weight"] == histogram(torch.stack(gradients[::3]))
        assert found["activation", "act"] == histogram(torch.stack(outputs[::3]))
        assert (w.report.num_steps, w.report.steps, w.report.compute) == (4, (), "fp32")

    def test_its_report_has_no_scale_and_no_skips(self) -> None:
        model = Net()
        with diagnose.watch(model) as w:
            plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, torch.bfloat16)
        text = str(w.report)
        assert text.startswith("mezzo watch of Net, not prepared")
        assert "loss scale" not in text and "skipped" not in text and w.report.compute == "bf16"

    def test_training_is_bit_equal_and_nothing_is_left(self) -> None:
        hooks = optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks
        before = [len(h) for h in hooks]
        states = []
        for watching in (False, True):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            w = diagnose.watch(model, every=1) if watching else None
            plain_loop(model, optimizer, 5, torch.bfloat16)
            if w is not None:
                w.close()
            states.append(model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
        assert [len(h) for h in hooks] == before
        assert not any(m._forward_hooks for m in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    @pytest.mark.parametrize("is_kept", [False, True])
    def test_lost_updates(self, is_kept: bool) -> None:
        model = Net().bfloat16()
        make = mezzo.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-7), mode="fp32")
        optimizer = make if is_kept else torch.optim.AdamW(model.parameters(), lr=1e-7)
        model.b.bias.data.zero_()  # one weight that moves
        with diagnose.watch(model, every=1) as w:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(6, 8).bfloat16()).float().square().mean().backward()
                optimizer.step()
        lost = {t.name: t.lost for t in w.report.tensors if t.kind == "weight"}
        assert (lost["a.weight"] > 0.5) is not is_kept
        assert w.report.num_steps == 2

    def test_another_models_optimizer_is_no_step(self) -> None:
        model, other = Net(), Net()
        with diagnose.watch(model) as w:
            plain_loop(other, torch.optim.SGD(other.parameters(), lr=0.1), 3)
        assert w.report.num_steps == 0 and w.report.tensors == ()

    def test_a_model_that_is_only_run(self) -> None:
        model, x = Net(), torch.randn(6, 8)
        with diagnose.watch(model) as w, torch.no_grad():
            out = model(x)
        kinds = {(t.kind, t.name): t.histogram for t in w.report.tensors}
        assert kinds["activation", "b"] == histogram(out)
        assert kinds["weight", "a.weight"] == histogram(model.a.weight)
        assert not [k for k in kinds if k[0] == "gradient"]

    def test_anything_else_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="watch was given Tensor; it takes what"):
            diagnose.watch(torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_copy_of_a_watched_model_is_not_watched(is_prepared: bool, copied: Callable[[nn.Module], nn.Module]) -> None:
    model, amp = make("bf16-master")
    x = torch.randn(6, 8)
    with diagnose.watch(amp if is_prepared else model, every=1) as w:
        target = copied(model)  # as the target network of a DQN is made, in its first step
        assert torch.equal(target(x), model(x))
        before = {t.name: t.histogram for t in w.report.tensors}
        target(x * 1000)
        assert {t.name: t.histogram for t in w.report.tensors} == before
        train(model, amp, 2)


@pytest.mark.parametrize("is_root", [True, False])
def test_what_holds_weights_beside_other_modules_is_looked_at_too(is_root: bool) -> None:
    """Attention multiplies by weights of its own, and calls no module for its products."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attention(x, x, x)[0])

    model = nn.MultiheadAttention(8, 2, batch_first=True) if is_root else Around()
    outputs = []
    attention = model if is_root else model.attention
    attention.register_forward_hook(lambda module, args, out: outputs.append(out[0].detach().clone()))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 8)
    with diagnose.watch(model, every=1) as w:
        for _ in range(3):
            optimizer.zero_grad()
            (model(x, x, x)[0] if is_root else model(x)).square().mean().backward()
            optimizer.step()
    name = "" if is_root else "attention"
    found = {(t.kind, t.name): t.histogram for t in w.report.tensors}
    assert found["activation", name] == histogram(torch.stack(outputs))
