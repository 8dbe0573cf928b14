"""`mezzo train` on the simulated accelerator and on the CPU; test_device.py runs it in a process of its own.

Prints what updates lost on each, and where the host stopped in updates after those that are looked at closely.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.device import sim
from tests.device.names import LOOKED_AT
from tests.train.small import emotion_rows, metrics, tiny, write_tsv

from mezzo.train import run
from mezzo.train.train_step import Updater


def main() -> None:
    seen: list[sim.Seen] = []
    step = Updater.step

    def watched(self: Updater, *forwards: object) -> object:
        with sim.watching() as now:
            update = step(self, *forwards)
        seen.append(now)
        return update

    Updater.step = watched
    root = Path(tempfile.mkdtemp())
    data = write_tsv(root / "rows.tsv", emotion_rows(120))
    found = {}
    for device in ("cpu", "sim"):
        seen.clear()
        out = root / device
        run(tiny(data, out, device=device, dropout=0.0, token_dropout=0.0, epochs=1))
        found[device] = [record["loss"] for record in metrics(out) if record["kind"] == "update"]
    stops = [now.stops + now.waits for now in seen[LOOKED_AT:]]
    print(json.dumps({**found, "stops": stops}))


if __name__ == "__main__":
    main()
