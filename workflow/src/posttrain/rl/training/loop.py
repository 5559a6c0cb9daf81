"""A step on one page: rollout, old log-probabilities, mismatch, update(s), weight sync, checkpoint.

Every rank runs this loop. Rank 0 also talks to the engines (in its own thread: a synchronous rollout leaves it nothing
else to do), writes metrics and commits checkpoints. A step depends only on the weights and its number, so a run that is
killed at any point resumes with the same bits.

A checkpoint is written during the next step's rollout, which does not change the trainer's state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from posttrain.report.progress import ProgressBar
from posttrain.report.rank_progress import BEGIN_SAVE, report_progress
from posttrain.rl.training.no_signal_monitor import NoSignalMonitor
from posttrain.rl.training.run import TrainingRun

log = logging.getLogger(__name__)


def train(run: TrainingRun, until: int = 0) -> bool:
    """Train from the run's newest checkpoint to its last step, or until a shutdown is requested.

    Args:
        run: Policy, engines, data and files of this run.
        until: Stop after this step; 0: after the run's last.

    Returns:
        Whether the last step is finished.
    """
    num_steps = until or run.config.training.num_steps
    finished, lessons = run.resume(), NoSignalMonitor()
    with ProgressBar("train", num_steps, unit="steps", quiet=not run.is_rank0) as bar:
        bar.advance(finished)
        while finished < num_steps and not run.ends_early:
            with run.traced(finished):
                metrics = train_step(run, finished)
            finished += 1
            bar.advance(1, note=progress_note(metrics) + lessons.note(metrics))
    run.state.finish_save(run.clock(finished))
    if run.ends_early:
        log.info("asked to end: step %d is saved", finished)
    return not run.ends_early


def train_step(run: TrainingRun, step: int) -> dict[str, float]:
    """Run one step and return its metrics (empty except on rank 0)."""
    clock = run.clock(step)
    run.reseed(step)
    evaluated = run.evaluate(step, clock)
    with clock.phase("rollout"):
        rollout = run.collect(step)
    run.state.finish_save(clock)
    run.find_slow_ranks()  # while engines are idle and no checkpoint is being written
    updates = run.make_updates(rollout.groups)
    with clock.phase("old_logprobs"):
        updates = run.with_old_logprobs(step, updates)
    with clock.phase("mismatch"):
        served = run.compare_served(step, updates)
    with clock.phase("train"):
        statistics, own = run.train_on(step, updates, served)
        finished = step + 1
        canary = run.canary_of(finished, rollout)
    with clock.phase("weight_sync"):
        if finished < run.config.training.num_steps:
            run.publish(finished)
        is_due = run.checkpoint_is_due(finished)
    metrics = run.log_step(step, rollout, updates, statistics, (own, served), evaluated, clock)
    if is_due:
        report_progress(step, BEGIN_SAVE)
        run.state.begin_save(finished, canary)
    return metrics


def progress_note(metrics: Mapping[str, float]) -> str:
    """Return the note beside the progress bar; it warns if trainer and engine log-probabilities differ."""
    note, share = f"reward {metrics.get('rollout/reward_mean', 0):.3f}", metrics.get("mismatch/share_of_limit", 0.0)
    if "train/perplexity" in metrics:
        note = f"perplexity {metrics['train/perplexity']:.3f}"
    return note if share <= 1 else f"{note}, MISMATCH {share:.3g} x its limit"
