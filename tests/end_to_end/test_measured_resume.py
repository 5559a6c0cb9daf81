"""Trainers killed while the policy is measured between steps: training and results are those of a calm run."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import TRAINER, Kill, assert_same_training, find_processes, start
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.report.rank_progress import EVALUATION, PROGRESS_VARIABLE, RankProgress, read_progress

NUM_STEPS = 11
MEASURED = FAST | {
    "training.num_steps": NUM_STEPS,
    # A kill of each measurement: what was trained before it is kept, so that the next attempt gets further.
    "trainer.save_interval": 1,
    "evaluation.interval": 1,
    "evaluation.max_share": 1,
    "data.num_heldout_prompts": 64,
    "evaluation.num_samples_per_prompt": 4,
}
# As long as a measurement takes on a quiet machine.
LONGEST_DELAY_SECONDS = 0.6
SEED = 21


def measured_step(trainer: psutil.Process) -> int:
    """Return before which step a trainer measures now; -1: it does not."""
    try:
        progress: RankProgress | None = read_progress(Path(trainer.environ()[PROGRESS_VARIABLE]))
    except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
        return -1
    return progress.step if progress and progress.phase == EVALUATION else -1


@pytest.mark.faults("training")
def test_a_killed_measurement_is_made_again(store: Path, tmp_path: Path, faults: FaultRecord) -> None:
    calm, killed = (WorkflowFolder(tmp_path / name, store, dict(MEASURED)) for name in ("calm", "killed"))
    calm.run("train")
    rng, started, left, kills = random.Random(SEED), time.monotonic(), set(range(1, NUM_STEPS)), []
    driver = start(killed, "train")
    while driver.process.poll() is None:
        for trainer in find_processes(killed, TRAINER):
            if (step := measured_step(trainer)) not in left:
                continue
            time.sleep(delay := rng.uniform(0, LONGEST_DELAY_SECONDS))
            # Counted only where the measurement was still going on.
            if measured_step(trainer) == step:
                trainer.kill()
                left.remove(step)
                kills.append(Kill(f"measurement before step {step}", delay))
        time.sleep(0.003)
    faults.add("measurements between steps", kills, time.monotonic() - started)
    assert driver.process.returncode == 0, driver.output[-4000:]
    assert len(kills) >= NUM_STEPS - 3, "measurements that were over before their time are few"
    assert_same_training(killed, calm)
    results = [
        {path.name: path.read_bytes() for path in (run.run_folder / "train/evaluations").iterdir()}
        for run in (calm, killed)
    ]
    assert len(results[0]) == NUM_STEPS - 1
    assert results[1] == results[0]
    faults.equal = True
