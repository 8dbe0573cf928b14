"""Notes and wide values belong to memory: views share them, and they go with it."""

from __future__ import annotations

import gc

import torch

from mezzo.trace.ops import Call, op_facts
from mezzo.trace.wide_values import StorageNotes, WideValues, at, flat


def test_a_view_has_the_wide_values_of_its_part() -> None:
    known, x = WideValues(), torch.zeros(4, 6, dtype=torch.float16)
    true = torch.arange(24.0).view(4, 6) * 1e4
    known.put(x, true)
    for view in (x.t(), x[1:3, ::2], x[3], x[1, 4]):
        got = known.get(view)
        assert got is not None and torch.equal(got, at(flat(true), view))
    assert torch.equal(known.get(x[1:3, ::2]), true[1:3, ::2])


def test_a_part_that_is_written_leaves_the_rest_as_it_was() -> None:
    known, x = WideValues(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    known.put(x[1:2], torch.tensor([1e5]))
    assert known.get(x).tolist() == [1.0, 1e5, 3.0]


def test_bytes_read_as_another_dtype_are_not_known() -> None:
    known, x = WideValues(), torch.ones(4)
    known.put(x, torch.ones(4, dtype=torch.float64))
    assert known.get(x[:1].view(torch.int16)) is None
    assert known.get(x.view(torch.int32)) is not None


def test_memory_that_grew_is_not_known_beyond_its_end() -> None:
    known, x = WideValues(), torch.ones(2)
    known.put(x, torch.ones(2, dtype=torch.float64))
    x.resize_(50)
    assert known.get(x) is None
    assert known.get(x[:2]) is not None


def test_what_is_forgotten_or_gone_has_no_note() -> None:
    notes: StorageNotes[str] = StorageNotes()
    kept, dropped = torch.ones(2), torch.ones(2)
    notes.note(kept, "kept")
    notes.note(dropped, "dropped")
    del dropped
    gc.collect()
    assert notes.live() == ["kept"]
    assert notes.get(kept[1:]) == "kept" and notes.get(torch.ones(2)) is None
    notes.forget(kept)
    assert notes.get(kept) is None


def test_notes_of_memory_that_is_gone_are_dropped() -> None:
    notes: StorageNotes[int] = StorageNotes()
    for n in range(2000):
        notes.note(torch.ones(1), n)
    assert len(notes) <= 257


def test_notes_on_what_an_op_read_are_those_on_the_memory_of_the_program() -> None:
    func, x, y = torch.ops.aten.add_.Tensor, torch.ones(2), torch.ones(2)
    call = Call(func, op_facts(func), (x, y), {})
    call.run((x, y), {})
    notes: StorageNotes[str] = StorageNotes()
    assert notes.first(call.originals) is None and notes.read_by(call) == []
    notes.note(x, "written")
    [(before, note)] = notes.read_by(call)
    assert before.tolist() == [1.0, 1.0] and note == notes.first(call.originals) == "written"
    known = WideValues()
    known.put_results(call, [torch.full((2,), 2.5)])
    assert known.known(call)[id(before)].tolist() == [2.5, 2.5]
    known.put_results(call, None)
    assert known.get(x) is None
