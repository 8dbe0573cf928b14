"""torch.compile of models that break the graph: the modes of a region see the ops between graphs, and are compiled by nobody."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.binding import forward


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_of_several_shapes(
    kind: type[nn.RNNBase], policy: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "is_emulated", lambda dtype: emulated)
    model = Recurrent(kind).eval()
    mezzo.prepare(model, None, policy)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for batch in (4, 6, 5):
            x = torch.randn(batch, 7, 16)
            assert torch.equal(compiled(x), model(x))
