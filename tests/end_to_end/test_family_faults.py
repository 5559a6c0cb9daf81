"""Small trainings of every family on two ranks, killed in every phase of a step: each ends with the bits of a calm one.

What is killed are the product's own ranks on stored rollouts. Engines, supervisor and driver are killed in test_faults.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.family_updates import parallel
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import Kill
from tests.support.killed_trainings import KINDS, prepare
from tests.support.megatron_single import run_gangs
from tests.support.tiny_checkpoint import FAMILIES

MOST_SECONDS = 45 * 60
KILLS_OF_EACH, LEAST_OF_A_KIND, LEAST = 6, 5, 100
# Two ranks; families without experts have none to spread.
LAYOUTS = ("tensor", "pipeline", "data", "tensor expert", "data expert")
CASES = [
    (family, layout)
    for family, arch in FAMILIES.items()
    for layout in LAYOUTS
    if arch.n_routed_experts or " " not in layout
]


@pytest.mark.faults("families")
def test_killed_trainings_of_every_family(tmp_path: Path, faults: FaultRecord) -> None:
    begun = time.monotonic()
    folders = {}
    for family, layout in CASES:
        folder = tmp_path / f"{family} {layout}".replace(" ", "-")
        prepare(folder, FAMILIES[family], parallel(layout, FAMILIES[family]))
        folders[str(folder)] = f"{family}, {layout}"
    order = {"folders": list(folders), "kills": KILLS_OF_EACH, "seed": 30}
    printed = run_gangs("killed_trainings", order, MOST_SECONDS).splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    for row in rows:
        faults.add(folders[row["folder"]], [Kill(*kill) for kill in row["kills"]], row["seconds"])
    assert [row["folder"] for row in rows] == list(folders)
    assert {row["folder"]: row["differences"] for row in rows if row["differences"]} == {}
    hit = Counter(phase for row in rows for phase, _ in row["kills"])
    assert hit.total() >= LEAST
    assert min(hit[kind] for kind in KINDS) >= LEAST_OF_A_KIND, hit
    assert time.monotonic() - begun <= MOST_SECONDS
    faults.equal = True
