from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from posttrain.launch.node import EndedByHead, NodeSupervisor
from posttrain.launch.ranks import Ending, RankProcess


class EndsBehindTheLook(RankProcess):
    """A rank whose process ends right after it was seen running."""

    def ending(self) -> Ending | None:
        found = super().ending()
        if self.process.returncode is None:
            self.process.communicate(b"\n")
        return found


class TakesNotes:
    """What a node tells its head, which then ends the attempt."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def tell(self, kind: str, **values: Any) -> None:
        self.told.append((kind, values))

    def next_message(self, seconds: float) -> None:
        if self.told and self.told[-1][0] in ("ended", "done"):
            raise EndedByHead


@pytest.mark.parametrize(("code", "kind"), [(1, "ended"), (0, "done")])
def test_how_a_rank_has_ended_counts_also_when_it_ended_between_two_looks(tmp_path: Path, code: int, kind: str) -> None:
    (tmp_path / "log").write_text("it says why")
    process = subprocess.Popen(["sh", "-c", f"read line; exit {code}"], stdin=subprocess.PIPE)
    rank = EndsBehindTheLook(0, process, tmp_path / "log", tmp_path / "progress")
    supervisor, head = object.__new__(NodeSupervisor), TakesNotes()
    supervisor._head = head
    with pytest.raises(EndedByHead):
        supervisor._watch([], [rank])
    told, values = head.told[-1]
    assert told == kind
    if kind == "ended":
        assert [ending["what"] for ending in values["endings"]] == ["trainer rank 0"]
