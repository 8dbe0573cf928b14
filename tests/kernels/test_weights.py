"""Tensors taken piece by piece: every element once, in views, and in step with each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mezzo.kernels.weights import AUX_STATE, CHUNK_NUMEL, chunks, give_master_, read_master, store_master, sum_of_bits

LONG = CHUNK_NUMEL + 5
LAYOUTS = {
    "straight": lambda: torch.zeros(LONG),
    "transposed": lambda: torch.zeros(3, LONG // 3).t(),
    "channels last": lambda: torch.zeros(2, 5, 300, 300).to(memory_format=torch.channels_last),
    "a slice": lambda: torch.zeros(2 * LONG)[::2],
    "expanded": lambda: torch.zeros(1).expand(7),
    "short": lambda: torch.zeros(3, 4),
    "one number": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_is_met_once(name: str) -> None:
    tensor = LAYOUTS[name]()
    assert sum(piece.numel() for (piece,) in chunks(tensor)) == tensor.numel()
    if name != "expanded":
        for (piece,) in chunks(tensor):
            piece += 1
        assert torch.equal(tensor, torch.ones_like(tensor))


def test_pieces_are_small_where_memory_allows() -> None:
    assert max(piece.numel() for (piece,) in chunks(LAYOUTS["channels last"]())) == CHUNK_NUMEL
    assert [piece.numel() for (piece,) in chunks(LAYOUTS["a slice"]())] == [LONG]


@pytest.mark.parametrize("same", [True, False])
def test_tensors_are_taken_in_step(same: bool) -> None:
    one = torch.randn(3, CHUNK_NUMEL, generator=torch.Generator().manual_seed(0))
    other = torch.empty_like(one) if same else torch.empty(CHUNK_NUMEL, 3).t()
    for source, target in chunks(one, other):
        target.copy_(source)
    assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["split", "fp32", "kahan", "stochastic"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_large_master_is_stored_as_a_small_one_is(mode: str, is_transposed: bool) -> None:
    master = torch.randn(2, CHUNK_NUMEL, generator=torch.Generator().manual_seed(0))
    master = master.t() if is_transposed else master
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    aux = give_master_(mode, weight, master)
    want, aux_state = store_master(mode, master, torch.bfloat16, None)
    assert torch.equal(weight, want)
    assert (aux is None) is (mode not in AUX_STATE)
    if isinstance(aux, Tensor):
        assert torch.equal(aux, aux_state) and aux.stride() == master.stride()
        assert aux.data_ptr() != master.data_ptr()
        assert torch.equal(read_master(mode, weight, aux), read_master(mode, want, aux_state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_of_bits_tells_each_element_and_not_how_it_lies(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 11).to(dtype)
    noted = sum_of_bits(tensor)
    assert sum_of_bits(tensor.t().contiguous().t()) == noted
    for index in range(tensor.numel()):
        edited = tensor.clone()
        edited.view(-1)[index] *= 2
        assert sum_of_bits(edited) != noted
    behind = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])
    assert sum_of_bits(behind[1:].view(7, 11)) == noted  # where no word of 8 bytes begins
    assert sum_of_bits(tensor.as_strided((1,), (2,))) == sum_of_bits(tensor[0, :1])  # as autograd of a stack gives it


def test_a_sum_of_bits_is_that_of_values_which_torch_negates_late() -> None:
    imaginary = torch.complex(torch.ones(1), torch.ones(1)).conj().imag
    assert imaginary.is_neg() and sum_of_bits(imaginary) == sum_of_bits(-torch.ones(1))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
def test_a_sum_of_bits_copies_none_of_it() -> None:
    tensor = torch.randn(1 << 16).bfloat16()
    with torch.profiler.profile(profile_memory=True) as profile:
        sum_of_bits(tensor)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) < tensor.nbytes / 100
