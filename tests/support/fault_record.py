"""The counts of `make test-faults`, kept in `.test-results/faults.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.support.workflow_runs import ROOT

if TYPE_CHECKING:
    from tests.support.interruptions import Kill

RESULTS = ROOT / ".test-results" / "faults.json"


class FaultRecord:
    """What a test did to the workflow, and whether the outcome was that of the undisturbed run."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.equal = False

    def add(self, killed: str, kills: Sequence[Kill], seconds: float) -> None:
        """Count processes killed with SIGKILL.

        Args:
            killed: Whose processes.
            kills: Each that hit.
            seconds: How long it took, with the runs after the kills.
        """
        points = [{"process": kill.rule, "seconds": round(kill.seconds, 3)} for kill in kills]
        self.rows.append(
            {"kind": "kills", "killed": killed, "count": len(kills), "points": points, "seconds": round(seconds, 1)}
        )

    def add_counts(self, kind: str, counts: dict[str, int], seconds: float) -> None:
        """Count something else: "crash_images", "bit_flips", "cluster_events".

        Args:
            kind: Its key in the summary.
            counts: How often, by where.
            seconds: For all together.
        """
        for where, count in counts.items():
            row = {"kind": kind, "killed": f"{kind}: {where}", "count": count, "seconds": round(seconds, 1)}
            self.rows.append(row)

    def add_events(self, events: Mapping[str, int], seconds: float, **figures: float) -> None:
        """Count what went wrong on a cluster.

        Args:
            events: How often, by kind.
            seconds: For all together.
            figures: What was measured.
        """
        self.add_counts("cluster_events", dict(events), seconds)
        self.rows[-len(events) :] = [row | figures for row in self.rows[-len(events) :]]

    def write(self) -> None:
        """Join the rows with those of other tests."""
        RESULTS.parent.mkdir(exist_ok=True)
        mine = {row["killed"]: {**row, "equal": self.equal} for row in self.rows}
        others = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        rows = [row for row in others if row["killed"] not in mine] + list(mine.values())
        counts = dict.fromkeys(("kills", "crash_images", "bit_flips", "cluster_events"), 0)
        for row in rows:
            counts[row.get("kind", "kills")] += row["count"]
        summary = {**counts, "all_equal": all(row["equal"] for row in rows)}
        RESULTS.write_text(json.dumps({"summary": summary, "rows": rows}, indent=2) + "\n")
        print("\n".join(f"{row['count']:4d} {row['killed']}, equal: {row['equal']}" for row in rows), summary)
