"""Checkpoints that are written while the main threads of one rank, here, or of two do something else."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tests.support.megatron_layouts import small_batches
from tests.support.megatron_single import initialize_single_rank, run_ranks, started_ranks, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.cluster.hang import describe_stacks
from posttrain.cluster.ranks import RankProcess
from posttrain.rl.training.checkpoints import CheckpointFolder, committed_checkpoints
from posttrain.store.lease import LeaseLostError

ROOT = Path(__file__).parents[4]
# Of two ranks that end by themselves; one that waits for its thread would take a day.
TIMEOUT_SECONDS = 120


SCRIPT = Path(__file__).parents[3] / "support" / "writing_rank.py"


def request(folder: Path, circumstance: str) -> str:
    return json.dumps({"root": str(ROOT), "folder": str(folder), "circumstance": circumstance})


def run(folder: Path, circumstance: str, exit_code: int = 0) -> list[str]:
    return run_ranks(SCRIPT, 2, request(folder, circumstance), timeout=TIMEOUT_SECONDS, exit_code=exit_code)


def answers(outputs: list[str]) -> list[dict]:
    return [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in outputs]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    outputs = run(tmp_path, "write_while_others_work")
    for rank, answer in enumerate(answers(outputs)):
        assert (answer["before"], answer["meanwhile"], answer["after"]) == (False, True, False)
        assert answer["names"] == ["step_000001.partial"], "not committed before it may be"
        assert answer["committed"] == ["step_000001"], f"committed when rank {rank} has waited for it"
        assert answer["forgotten"] == ([1, 2] if rank == 0 else [])
        assert answer["loaded"] == 2
    assert "checkpoint after step 1 committed, written in" in outputs[0]
    assert "committed" not in outputs[1].partition("{")[0]


def test_a_disk_without_room_is_named_by_every_rank(tmp_path: Path) -> None:
    for answer in answers(run(tmp_path, "run_out_of_space")):
        first, needed, free, remedy = answer["told"].splitlines()
        assert first == f"{tmp_path}/step_000001.partial: the file is larger than files may be"
        assert needed == "  needed: 5368709120 bytes (5.00 GiB)"
        assert int(free.split()[1]) > 0, "bytes that are free there"
        assert "ulimit -f" in remedy
        assert answer["names"] == ["step_000001.partial"], "nothing is committed"


def test_a_tensor_of_which_ranks_lack_a_part_is_refused(tmp_path: Path) -> None:
    for answer in answers(run(tmp_path, "write_parts")):
        assert answer["halves"] == "written"
        assert "key:w invalid fill tensor-volume: 12 chunks-volume: 6" in answer["the same half"]
        assert "key:w invalid fill tensor-volume: 18 chunks-volume: 12" in answer["two thirds"]


def test_a_failure_in_the_thread_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    first, second = run(tmp_path, "lose_the_lease", exit_code=1)
    assert "another one writes" in first
    assert "{" not in second
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001.partial"]


def test_a_rank_that_fails_does_not_wait_for_its_thread(tmp_path: Path) -> None:
    for output in run(tmp_path, "fail_meanwhile", exit_code=1):
        assert "no engine answers" in output


def test_of_ranks_that_wait_for_a_checkpoint_the_one_that_holds_it_up_is_named(tmp_path: Path) -> None:
    expected, found = "rank 1 in barrier; rank 0 on a is in none", ""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with started_ranks(SCRIPT, 2, request(tmp_path, "hang"), logs=tmp_path) as processes:
        ranks = [RankProcess(rank, p, tmp_path / f"{rank}.log", tmp_path / "none") for rank, p in enumerate(processes)]
        while not (tmp_path / "step_000001.partial/manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        while found != expected and time.monotonic() < deadline:
            found = describe_stacks({rank.rank: rank.stack() for rank in ranks}, {0: "a", 1: "b"})
    assert found == expected


# ---- one rank, in this process ----


@pytest.fixture(scope="module")
def policy():
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.optimizer_state import allocate_state

    config = small_batches(test_config(TINY), ranks=1)
    initialize_single_rank(config)
    policy = build_policy(config)
    allocate_state(policy.optimizer)
    return policy


def open_writer(policy, folder: Path, may_commit=lambda: None, keep: int = 2):
    from posttrain.rl.training.checkpoint_writer import CheckpointWriter

    forgotten: list[int] = []
    writer = CheckpointWriter(policy, CheckpointFolder(folder, keep, may_commit), 5 << 30, forgotten.append)
    return writer, forgotten


def test_one_checkpoint_after_the_other(policy, tmp_path, caplog):
    caplog.set_level("INFO")
    writer, forgotten = open_writer(policy, tmp_path)
    assert not writer.is_writing
    for step in (3, 4, 5):
        writer.begin(step)
        assert writer.is_writing
        with pytest.raises(AssertionError, match="one checkpoint at a time"):
            writer.begin(step + 1)
        writer.finish()
        assert not writer.is_writing
        with pytest.raises(AssertionError, match="no checkpoint was begun"):
            writer.finish()
    assert [step for step, _ in committed_checkpoints(tmp_path)] == [4, 5]
    assert forgotten == [3, 4, 5]
    assert "checkpoint after step 5 committed, written in " in caplog.text
    (seconds,) = [float(r.args[1]) for r in caplog.records if r.args and r.args[0] == 5]
    assert 0 < seconds < 60


def test_what_is_committed_is_hashed_and_has_the_number_of_steps(policy, tmp_path):
    from posttrain.rl.megatron_backend.checkpoint import load_training_state

    writer, _ = open_writer(policy, tmp_path)
    writer.begin(7)
    writer.finish()
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    checkpoints.check_content(7)
    names = {row["path"] for row in json.loads((checkpoints.path(7) / "manifest.json").read_text())}
    assert names == {".metadata", "__0_0.distcp", "common.pt", "metadata.json"}
    assert load_training_state(policy, checkpoints.path(7)) == 7


def test_a_commit_is_waited_for_and_nothing_is_forgotten_before_it(policy, tmp_path):
    go_on = threading.Event()
    writer, forgotten = open_writer(policy, tmp_path, may_commit=go_on.wait)
    writer.begin(1)
    while not (tmp_path / "step_000001.partial" / "manifest.json").exists():
        assert writer.is_writing
    assert (committed_checkpoints(tmp_path), forgotten) == ([], [])
    go_on.set()
    writer.finish()
    assert ([step for step, _ in committed_checkpoints(tmp_path)], forgotten) == ([1], [1])


def test_who_lost_the_lease_forgets_nothing(policy, tmp_path):
    def refuse() -> None:
        raise LeaseLostError("another one writes")

    writer, forgotten = open_writer(policy, tmp_path, refuse)
    writer.begin(1)
    with pytest.raises(LeaseLostError):
        writer.finish()
    assert (committed_checkpoints(tmp_path), forgotten) == ([], [])


def test_what_cannot_be_written_is_named_with_what_it_takes(policy, tmp_path):
    (tmp_path / "step_000001.partial").mkdir()
    writer, _ = open_writer(policy, tmp_path)
    with pytest.raises(FileExistsError) as raised:
        writer.begin(1)
    assert raised.value.filename == str(tmp_path / "step_000001.partial")
    assert raised.value.__notes__ == ["needed: 5368709120 bytes (5.00 GiB)"]


def test_a_thread_tells_how_it_went():
    from posttrain.rl.training.checkpoint_writer import in_thread

    where = []
    assert in_thread(lambda: where.append(threading.current_thread())).result(10) is None
    (thread,) = where
    assert thread is not threading.main_thread()
    assert (thread.name, thread.daemon) == ("checkpoint", True)
    with pytest.raises(SystemExit):
        in_thread(lambda: exec("raise SystemExit(3)")).result(10)
