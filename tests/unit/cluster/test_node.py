from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.cluster.node import EndedByHead, NodeSupervisor, _end_silent
from posttrain.cluster.ranks import Ending, RankProcess


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


class Dies:
    """An engine that has ended, until it starts again."""

    url, has_ended, num_starts = "http://here", True, 0

    def end_hard(self) -> None:
        self.has_ended = True

    def check_alive(self) -> None:
        if self.has_ended:
            raise RuntimeError("engine 0 ended")

    def restart(self) -> None:
        self.has_ended, self.num_starts = False, self.num_starts + 1


def test_an_engine_that_hangs_is_ended_where_it_is_and_nowhere_else() -> None:
    here, there, gone = Dies(), Dies(), Dies()
    here.has_ended = there.has_ended = False
    there.url = "http://there"
    _end_silent([there, here, gone], "http://here")
    assert (here.has_ended, there.has_ended) == (True, False)


class TellsPhases(TakesNotes):
    """A head that knows in which phase ranks are, and ends the attempt when all is said and well."""

    def __init__(self, phases: list[str | None], engine: Dies) -> None:
        super().__init__()
        self.phases, self.engine = phases, engine

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        super().next_message(seconds)
        if not self.phases and not self.engine.has_ended:
            raise EndedByHead
        time.sleep(0.02)
        phase = self.phases.pop(0) if self.phases else None
        return {"kind": "phase", "position": {"step": 3, "phase": phase}} if phase else None


@pytest.mark.parametrize(
    ("phases", "starts", "told"),
    [
        (["rollout"], 1, []),
        # the news come a moment after the end
        (["weight_sync", None, "rollout"], 1, []),
        (["train"], 0, ["ended"]),
        ([], 0, ["ended"]),
    ],
)
def test_a_node_without_ranks_starts_engines_again_in_rollouts(
    monkeypatch: pytest.MonkeyPatch, phases: list[str | None], starts: int, told: list[str]
) -> None:
    monkeypatch.setattr("posttrain.cluster.node.NEWS_SECONDS", 0.2)
    engine = Dies()
    supervisor, head = object.__new__(NodeSupervisor), TellsPhases(phases, engine)
    supervisor._head, supervisor._restarts = head, Counter()
    supervisor._engines = SimpleNamespace(alone={engine.url})
    with pytest.raises(EndedByHead):
        supervisor._serve([engine])
    assert engine.num_starts == starts
    assert [kind for kind, _ in head.told] == told
