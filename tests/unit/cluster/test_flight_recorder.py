"""Where NCCL's record is asked for and told. No GPU is here: the pipe's other end is opened as torch opens it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from posttrain.cluster import node
from posttrain.cluster.flight_recorder import PIPE, PREFIX, ask_for_record, describe_records, recorder_environment
from posttrain.cluster.ranks import RankProcess, Rendezvous, running_ranks
from posttrain.config.load import Resolved
from posttrain.report.rank_progress import PROGRESS_VARIABLE


def test_nobody_listens(tmp_path: Path) -> None:
    assert not ask_for_record(tmp_path, 3)
    os.mkfifo(tmp_path / f"{PIPE}3.pipe")
    assert not ask_for_record(tmp_path, 3), "it does not wait for a reader"


def test_torch_is_asked_and_its_record_is_named(tmp_path: Path) -> None:
    """As `DumpPipe` of torch's ProcessGroupNCCL.hpp does: a pipe, opened without waiting, looked into every second."""
    pipe, logs = tmp_path / "own" / f"{PIPE}1.pipe", tmp_path / "logs"
    pipe.parent.mkdir()
    logs.mkdir()
    (logs / "log").touch()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer() -> None:
        while not os.read(reader, 128):
            time.sleep(0.1)
        (logs / f"{PREFIX}1").write_bytes(b"pickled")

    torch_thread = threading.Thread(target=answer, daemon=True)
    torch_thread.start()
    process = psutil.Popen([sys.executable, "-c", "input(); import os; os.abort()"], stdin=subprocess.PIPE)
    rank = RankProcess(1, process, logs / "log", tmp_path / "own" / "1")
    silent = RankProcess(2, process, logs / "log", tmp_path / "own" / "2")
    assert node._records([rank, silent]) == [str(logs / f"{PREFIX}1")]
    torch_thread.join()
    os.close(reader)
    process.communicate(b"\n")
    ending = rank.ending()
    assert ending is not None
    assert f"{logs}/{PREFIX}1" in ending.reason
    assert f"torchfrtrace --prefix {PREFIX} {logs}" in ending.reason


def test_many_records_are_one_line() -> None:
    said = describe_records([Path(f"/logs/{PREFIX}{rank}") for rank in range(128)])
    assert said.startswith(f"NCCL's last calls are in /logs/{PREFIX}* (128 files), which `torchfrtrace ")
    assert describe_records([]) == ""


@pytest.mark.parametrize(("model", "listens"), [("glm5_4layer", True), ("tiny", False)])
def test_ranks_know_where_to_write_and_have_no_allocator_of_their_shell(
    resolved: Callable[..., Resolved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, listens: bool
) -> None:
    """The variables of real processes, which end at once: their command line is a question."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    config = resolved(model).config
    with running_ranks(config, 0, ["--help"], Rendezvous("here", 1), tmp_path, "secret") as ranks:
        variables = ranks[-1].process.environ()
    own_folder = Path(variables[PROGRESS_VARIABLE]).parent
    assert recorder_environment(config, own_folder, tmp_path).items() <= variables.items()
    assert ("TORCH_FR_DUMP_TEMP_FILE" in variables) is listens
    assert ("TORCH_NCCL_DUMP_ON_TIMEOUT" in variables) is listens
    assert "PYTORCH_ALLOC_CONF" not in variables
    assert variables.get("PYTORCH_CUDA_ALLOC_CONF") == ("expandable_segments:True" if listens else None)
