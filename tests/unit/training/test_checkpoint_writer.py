"""Checkpoints that are written while the main threads of two ranks do something else."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.megatron_single import run_ranks, started_ranks

from posttrain.launch.hang import describe_stacks
from posttrain.launch.ranks import RankProcess

ROOT = Path(__file__).parents[3]
# Of two ranks that end by themselves; one that waits for its thread would take a day.
TIMEOUT_SECONDS = 120


SCRIPT = Path(__file__).with_name("writing_rank.py")


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
