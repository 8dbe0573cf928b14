"""What `memory` predicts is what training then holds, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo.diagnose as diagnose
import mezzo.optim
from mezzo.diagnose.memory import size
from mezzo.errors import ConfigError, PolicyError
from mezzo.step import prepare


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(50, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm, self.stats, self.head = nn.LayerNorm(32), nn.BatchNorm1d(32), nn.Linear(32, 10, bias=False)
        self.table.weight.requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index)
        return self.head(self.stats(self.norm(x + self.body(x)).float()))


BATCH = torch.randint(50, (16,), generator=torch.Generator().manual_seed(0))
SETUPS = [
    ("fp32", lambda p: torch.optim.AdamW(p)),
    ("fp32", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ("fp32", lambda p: torch.optim.SGD(p, lr=0.1)),
    ("fp32", lambda p: torch.optim.AdamW(p, amsgrad=True)),
    ("fp16", lambda p: torch.optim.AdamW(p)),
    ("bf16", lambda p: torch.optim.Adam(p)),
    ("bf16", lambda p: mezzo.optim.AdamW(p)),
    ("bf16-master", lambda p: mezzo.optim.AdamW(p, master="split")),
    ("bf16-master, state=bf16", lambda p: mezzo.optim.AdamW(p, master="split", state_dtype=torch.bfloat16)),
    ("fp16-master", lambda p: mezzo.optim.AdamW(p, master="fp32")),
    ("bf16-master, master=kahan", lambda p: mezzo.optim.SGD(p, lr=0.1, momentum=0.9, master="kahan")),
    ("bf16-master, master=stochastic", lambda p: mezzo.optim.AdamW(p, master="stochastic")),
    ("bf16-master", lambda p: torch.optim.AdamW(p)),
    ("bf16-master", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ("bf16-master", lambda p: mezzo.optim.AdamW(p)),
    ("fp16-master", lambda p: torch.optim.RMSprop(p)),
    ("bf16-master, master=fp32", lambda p: mezzo.optim.MasterWeights(torch.optim.AdamW(p), mode="fp32")),
]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of live tensors, step counts left out."""
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor) and t.numel() > 1]
    return {
        "weights": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer state": sum(t.nbytes for t in state),
    }


@pytest.mark.parametrize(("policy", "make"), SETUPS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(SETUPS)])
def test_the_prediction_is_exact(policy: str, make) -> None:
    model = Net()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    before = {n: (t.dtype, t.clone()) for n, t in model.state_dict().items()}
    predicted = diagnose.memory(model, optimizer, policy)
    assert all(t.dtype is before[n][0] and torch.equal(t, before[n][1]) for n, t in model.state_dict().items())
    assert not any(optimizer.state.values())

    amp = prepare(model, optimizer, policy)
    amp.backward(model(BATCH).float().square().mean())
    assert amp.step().applied
    actual = held(model, optimizer)
    assert {kind: predicted.bytes_of(kind) for kind in actual} == actual
    assert predicted.held_bytes == sum(actual.values())


@pytest.mark.parametrize(
    ("policy", "make", "bytes_each"),
    [
        ("fp32", lambda p: torch.optim.AdamW(p), 16),
        ("bf16-master", lambda p: mezzo.optim.AdamW(p, master="split"), 14),
        ("bf16-master, state=bf16", lambda p: mezzo.optim.AdamW(p, master="split", state_dtype=torch.bfloat16), 10),
        ("bf16-master, master=stochastic", lambda p: mezzo.optim.AdamW(p, master="stochastic"), 12),
    ],
)
def test_bytes_a_parameter(policy: str, make, bytes_each: int) -> None:
    model = nn.Linear(64, 64)
    assert diagnose.memory(model, make(model.parameters()), policy).per_parameter == bytes_each


def test_casts_of_fp32_weights_are_counted_where_nothing_is_measured() -> None:
    model = Net()
    linear = sum(p.numel() for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert diagnose.memory(model, None, "bf16").bytes_of("weight casts") == 2 * linear
    assert diagnose.memory(model, None, "fp32").bytes_of("weight casts") == 0


def test_activations_are_what_forward_saves() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    x = torch.randn(32, 8)
    loss = lambda m, b: m(b).sum()  # noqa: E731
    fp32 = diagnose.memory(model, None, "fp32", batch=x, loss_fn=loss)
    # the input, and the result of tanh, which its own backward and the second product share
    assert fp32.bytes_of("activations") == 4 * 32 * (8 + 16)
    bf16 = diagnose.memory(model, None, "bf16", batch=x, loss_fn=lambda m, b: m(b).float().sum())
    # the same in 16 bit, and the second weight's cast, which the gradient of its input needs
    assert bf16.bytes_of("activations") == 2 * (32 * (8 + 16) + 16 * 4)
    assert fp32.peak_bytes == fp32.held_bytes + fp32.bytes_of("activations")


def test_an_optimizer_of_another_master_mode_is_refused_as_prepare_refuses_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = mezzo.optim.AdamW(model.parameters(), master="kahan")
    for use in (diagnose.memory, prepare):
        with pytest.raises(PolicyError, match="master='split'"):
            use(model, optimizer, "bf16-master")


def test_no_memory_is_taken_to_predict() -> None:
    model = nn.Linear(2048, 2048)
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta)
            return out

    optimizer = torch.optim.AdamW(model.parameters())
    with Watch():
        report = diagnose.memory(model, optimizer, "bf16")
    assert max(made) < 2**16
    assert report.bytes_of("weights") == model.weight.nbytes + model.bias.nbytes


def test_the_report_reads() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    text = str(diagnose.memory(model, mezzo.optim.AdamW(model.parameters(), master="split"), "bf16-master"))
    assert "14.0 bytes a trainable parameter" in text
    assert "Give a batch to have the activations measured too." in text
    assert size(5 * 2**20) == "5.0 MiB"


def test_an_optimizer_of_another_model_is_told() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"AdamW, none of whose 2 parameters belongs to the Linear"):
        diagnose.memory(nn.Linear(4, 4), torch.optim.AdamW(net.parameters()), "bf16")
    beside = nn.Parameter(torch.ones(()))
    assert diagnose.memory(net, torch.optim.AdamW([*net.parameters(), beside]), "bf16").trainable == 20
