"""Events and records as a trace writes them down, made by hand."""

from __future__ import annotations

from mezzo.trace.records import Event, Sink, Site, TensorFacts, TraceRecord, Wide


def facts(name: str = "self", dtype: str = "fp16", amax: float = 1.0, **counts: int) -> TensorFacts:
    return TensorFacts(
        name=name, dtype=dtype, shape=(4,), device="cpu", amax=amax,
        **{"nan": 0, "posinf": 0, "neginf": 0, "zeros": 0, **counts},
    )  # fmt: skip


def event(**changes: object) -> Event:
    site = Site(
        phase="forward", root="Net", module="body", classes=("Net", "Linear"), user=None, library=None,
        called="linear", op="addmm", step=0, rank=0,
    )  # fmt: skip
    values: dict[str, object] = {
        "index": 0, "kind": "source", "kernel": "aten.addmm", "site": site, "inputs": (facts(),),
        "outputs": (facts("result 0", posinf=1),), "parents": frozenset(), "wide": (), "offending": (),
        "full_rows": 0, "loss_scale": 1.0, "flush": None, "leaf": "",
    }  # fmt: skip
    placed = {name: changes.pop(name) for name in ("phase", "step") if name in changes}
    values["site"] = Site(**{f: getattr(site, f) for f in Site.__dataclass_fields__} | placed)
    return Event(**{**values, **changes})


def wide(amax: float, is_finite: bool = True, dtype: str = "fp32", has_nan: bool = False) -> Wide:
    return Wide(dtype=dtype, is_finite=is_finite, amax=amax, has_nan=has_nan)


def record(events: list[Event], *sinks: Sink) -> TraceRecord:
    return TraceRecord(
        model="Net",
        events=tuple(events),
        sinks=sinks,
        sizes=(),
        lost=(),
        lints=(),
        lines=(),
        ops=1,
        steps=1,
        rank=0,
        torch="2",
    )


def sink(kind: str, *causes: int, step: int = 0) -> Sink:
    return Sink(kind=kind, name=kind, causes=frozenset(causes), step=step)
