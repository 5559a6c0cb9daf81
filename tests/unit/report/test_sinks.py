import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from tests.support.rejections import rejected

from posttrain.config.schema import Logging
from posttrain.report.sinks import MetricSinks, read_rows

NO_WANDB = Logging(wandb=False)


def values_of(step):
    return {"rollout/reward_mean": 0.1 * step, "train/loss": math.sin(step)}


def write_steps(folder, steps, last_step=None):
    with MetricSinks(folder, "run", NO_WANDB, last_step=last_step) as sinks:
        for step in steps:
            sinks.log(step, values_of(step))


def test_rows_come_back_with_the_same_bits(tmp_path):
    write_steps(tmp_path, range(1, 6))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [{"step": step, **values_of(step)} for step in range(1, 6)]


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    sinks = MetricSinks(tmp_path, "run", NO_WANDB)
    sinks.log(1, values_of(1))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
    sinks.close()


def test_a_refused_row_leaves_the_file_as_it_was(tmp_path):
    with MetricSinks(tmp_path, "run", NO_WANDB) as sinks:
        sinks.log(1, values_of(1))
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with pytest.raises(ValueError, match="train/loss = nan"):
            sinks.log(2, {"train/loss": math.nan})
        with pytest.raises(ValueError, match="train/lossy: no such metric"):
            sinks.log(2, {"train/lossy": 1.0})
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        sinks.log(2, values_of(2))


def test_a_step_cannot_be_logged_twice(tmp_path):
    with MetricSinks(tmp_path, "run", NO_WANDB) as sinks:
        sinks.log(4, values_of(4))
        with pytest.raises(AssertionError, match="step 4 after step 4"):
            sinks.log(4, values_of(4))


def test_resuming_cuts_off_later_steps_and_ends_with_the_undisturbed_bytes(tmp_path):
    write_steps(tmp_path / "straight", range(1, 9))
    write_steps(tmp_path / "resumed", range(1, 8))
    write_steps(tmp_path / "resumed", range(5, 9), last_step=4)
    assert (tmp_path / "resumed/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()


def test_a_fresh_start_keeps_nothing(tmp_path):
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, [1])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    write_steps(tmp_path, range(1, 4))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "train/lo')
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    write_steps(tmp_path, [4], last_step=3)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    write_steps(tmp_path, range(1, 4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    with rejected("metrics-invalid", "metrics.jsonl:2"):
        MetricSinks(tmp_path, "run", NO_WANDB, last_step=3)


def test_resuming_without_the_row_of_the_resumed_step_is_refused(tmp_path):
    write_steps(tmp_path, range(1, 4))
    with rejected("metrics-incomplete", "step 7", "step 3"):
        MetricSinks(tmp_path, "run", NO_WANDB, last_step=7)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_kills_at_any_moment_leave_whole_rows_without_gaps(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from posttrain.config.schema import Logging
        from posttrain.report.sinks import MetricSinks, read_rows
        folder, until = Path(sys.argv[1]), int(sys.argv[2])
        rows = read_rows(folder / "metrics.jsonl")
        last = max((int(row["step"]) for row in rows), default=0) // 10 * 10 or None
        with MetricSinks(folder, "run", Logging(wandb=False), last_step=last) as sinks:
            for step in range((last or 0) + 1, until + 1):
                sinks.log(step, {"train/loss": step / 7})
                print(step, flush=True)
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path), "400"]
    for wanted in (13, 47, 120):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if int(line) >= wanted:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, "train/loss": step / 7} for step in range(1, 401)]
