"""The one table of metric names: what each means, its unit, and whether it is a timing.

Every metric of a step has a name from `METRICS`; the sinks reject any other. A run that was killed and resumed must
repeat every number of the undisturbed run bit for bit, except those marked `is_timing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.plan.sizing.phases import LIKE_OTHERS, PHASES
from posttrain.rl.algorithm.statistics import STATISTICS


@dataclass(frozen=True)
class Metric:
    """The meaning of one number per step.

    Args:
        doc: Its definition, with the denominator where there is one.
        unit: Unit as printed on an axis; "" for a pure number.
        is_timing: It depends on the clock, so it is never compared between two runs.
    """

    doc: str
    unit: str = ""
    is_timing: bool = False


# Numbers of an episode: metrics are their means over a step's episodes, and percentiles of those `PERCENTS`.
EPISODE_NUMBERS: Mapping[str, Metric] = {
    "episode/turns": Metric("Responses in an episode"),
    "episode/tool_calls": Metric("Functions that an episode's responses called"),
    "episode/observed_tokens": Metric("Tokens that the model read after its first response", "tokens"),
    "perf/environment_seconds": Metric("Time of an episode in its environment", "s", is_timing=True),
    "perf/engine_seconds": Metric("Time of an episode in engines", "s", is_timing=True),
}
PERCENTS = (50, 90)


def percentile_name(name: str, percent: int) -> str:
    """Return the metric of a percentile of an episode's number.

    Example:
        ("episode/turns", 90) -> "episode/turns_p90".
    """
    return f"{name}_p{percent}"


def _percentiles() -> dict[str, Metric]:
    return {
        percentile_name(name, percent): Metric(f"{known.doc}: {percent}th percentile", known.unit, known.is_timing)
        for name, known in EPISODE_NUMBERS.items()
        for percent in PERCENTS
    }


METRICS: Mapping[str, Metric] = {
    # ---- what the engines made ----
    "rollout/reward_mean": Metric("Mean reward of the step's samples that have one"),
    "rollout/pass_rate": Metric("Share of the graded samples whose first grader gives at least 1"),
    "rollout/reward_std_zero_fraction": Metric("Share of groups whose rewards are all equal: they teach nothing"),
    "rollout/response_tokens_mean": Metric("Mean length of a response", "tokens"),
    "rollout/response_tokens_max": Metric("Longest response of the step", "tokens"),
    "rollout/truncated_fraction": Metric("Share of responses cut at rollout.max_response_tokens"),
    "rollout/grader_failures": Metric("Samples that a grader failed for; they have no reward", "samples"),
    "rollout/ungraded_samples": Metric("Samples without a reward: a grader failed, or none applies", "samples"),
    # ---- episodes in an environment; means over the step's trajectories ----
    **EPISODE_NUMBERS,
    **_percentiles(),
    "episode/segments": Metric("Segments of an episode: parts that are separate sequences"),
    # ---- the queue between engines and trainer; on the clock, like timings ----
    "queue/staleness_mean": Metric("Mean age of the sampled tokens trained on", "updates", is_timing=True),
    "queue/staleness_max": Metric(
        "Age of the oldest token trained on; at most max_staleness", "updates", is_timing=True
    ),
    "queue/mixed_version_fraction": Metric("Share of trajectories sampled by several weight versions", is_timing=True),
    "queue/groups_ready": Metric(
        "Groups that waited for the trainer when the step took its own", "groups", is_timing=True
    ),
    "queue/groups_running": Metric("Groups that engines were generating then", "groups", is_timing=True),
    "queue/dropped_equal_rewards": Metric(
        "Groups dropped since the last step: equal rewards", "groups", is_timing=True
    ),
    "queue/dropped_no_environment": Metric(
        "Groups dropped since the last step: their environment could not begin", "groups", is_timing=True
    ),
    # ---- what the trainer did ----
    "train/loss": Metric("Loss, averaged over the step's updates"),
    "train/grad_norm": Metric("Global gradient norm before clipping"),
    "train/lr": Metric("Learning rate of the step's last update"),
    **{f"train/{name}": Metric(known.doc, known.unit) for name, known in STATISTICS.items()},
    "train/num_tokens": Metric("Tokens trained on, prompts included, padding not", "tokens"),
    "train/num_response_tokens": Metric("Response tokens trained on", "tokens"),
    "train/effective_sample_size": Metric(
        "Effective sample size of the importance ratios of the step's updates, as a share of their response tokens"
    ),
    "train/perplexity": Metric("exp(-train/logprob_mean): of the given response tokens"),
    "train/num_micro_batches": Metric("Micro-batches of all data-parallel ranks"),
    "train/padding_fraction": Metric("Share of the computed tokens that are padding"),
    "train/non_finite_steps": Metric("Updates left out so far because loss or gradient norm was not finite", "updates"),
    "train/zero_advantage_updates": Metric("Updates of the step in which no token had an advantage", "updates"),
    # ---- expert load of the updates' tokens, over MoE layers ----
    "moe/busiest_expert_max": Metric("Tokens of a layer's busiest expert over its experts' mean, in the worst layer"),
    "moe/busiest_expert_mean": Metric("Tokens of a layer's busiest expert over its experts' mean, mean over layers"),
    "moe/idle_experts": Metric("Share of the experts that saw no token"),
    "moe/router_bias_max": Metric("Largest |bias| of a router"),
    # ---- trainer against engine, on the same tokens ----
    "mismatch/abs_diff_mean": Metric(
        "Mean |trainer - engine| log-probability on the very weights the engine serves, dequantised", "nats"
    ),
    "mismatch/abs_diff_max": Metric("Largest |trainer - engine| log-probability on the weights served", "nats"),
    "mismatch/quantised_abs_diff_mean": Metric(
        "Mean |trainer - engine| log-probability with the trainer's own weights: what quantisation adds",
        "nats",
    ),
    "mismatch/kl_k3": Metric(
        "k3 estimate of the KL divergence of engine and trainer, with the trainer's own weights", "nats"
    ),
    "mismatch/effective_sample_size": Metric(
        "Effective sample size of exp(trainer - engine), with the trainer's own weights, as a share"
    ),
    "mismatch/share_of_limit": Metric(
        "Mean |trainer - engine| over what trainer.mismatch expects at most, the larger of the two comparisons"
    ),
    # ---- the clock ----
    "perf/step_seconds": Metric("The whole step", "s", is_timing=True),
    "perf/rollout_seconds": Metric("Generation and grading", "s", is_timing=True),
    "perf/evaluation_seconds": Metric("Measuring on held-out prompts and suites", "s", is_timing=True),
    "perf/old_logprobs_seconds": Metric("Log-probabilities before the update", "s", is_timing=True),
    "perf/train_seconds": Metric("Forward, backward and optimizer", "s", is_timing=True),
    "perf/weight_sync_seconds": Metric("New weights into the engines", "s", is_timing=True),
    "perf/publish_pause_seconds": Metric(
        "Of it, from the pause of running requests until they go on with the new weights", "s", is_timing=True
    ),
    "perf/asleep_seconds": Metric(
        "Between phases: one of trainer and engines goes to sleep, and the other wakes up", "s", is_timing=True
    ),
    "perf/mismatch_seconds": Metric("Comparison of trainer and engine", "s", is_timing=True),
    "perf/save_seconds": Metric(
        "Waiting, after the rollout, for the checkpoint of the step before to be written", "s", is_timing=True
    ),
    "perf/save_pause_seconds": Metric(
        "What that checkpoint has kept the trainer: its beginning, between the steps, and perf/save_seconds",
        "s",
        is_timing=True,
    ),
    "perf/mfu": Metric(
        "Operations of the model's forward and backward passes, recomputation apart, over perf/train_seconds and the "
        "trainer's BF16 peak",
        is_timing=True,
    ),
    **{
        f"perf/{name}_peak_gib": Metric(f"{name}: memory of the fullest rank, on its GPU or else resident", "GiB", True)
        for name in (*PHASES, *LIKE_OTHERS)
    },
    "perf/prefix_hit_rate": Metric("Share of the read tokens that an engine had in its prefix cache", is_timing=True),
    "perf/tokens_per_second": Metric("train/num_tokens over perf/step_seconds", "tokens/s", is_timing=True),
    "perf/response_tokens_per_second": Metric(
        "train/num_response_tokens over perf/step_seconds", "tokens/s", is_timing=True
    ),
}

# Prefixes of metrics whose names end with a name from the run, such as a grader or a suite.
FAMILIES: Mapping[str, Metric] = {
    "reward/": Metric("Mean score of one grader, or of a number that it tells, over the samples that it applies to"),
    "evaluation/": Metric("A suite's pass rate or mean reward, by the weights that sample the step's rollout"),
    "queue/age_": Metric("Share of the sampled tokens of one age in updates", is_timing=True),
    "source/": Metric("Share of the graded samples of one source whose first grader gives at least 1"),
}


def metric_of(name: str) -> Metric | None:
    """Return the definition of a metric, or None if there is no such metric."""
    family = next((metric for prefix, metric in FAMILIES.items() if name.startswith(prefix)), None)
    return METRICS.get(name, family)


def check_metrics(values: Mapping[str, float]) -> None:
    """Reject names that are not in `METRICS` and values that are not finite.

    The caller leaves out values that could not be measured; NaN and infinity are defects and are rejected by name.

    Raises:
        ValueError: Listing every unknown name and every bad value.
    """
    unknown = [
        f"{name}: no such metric (report/metrics.py holds the table)" for name in values if metric_of(name) is None
    ]
    bad = [
        f"{name} = {value!r}: not a finite number"
        for name, value in values.items()
        if metric_of(name) and not _is_finite_number(value)
    ]
    if problems := [*unknown, *bad]:
        raise ValueError("metrics refused:\n  " + "\n  ".join(problems))


def without_timings(row: Mapping[str, float]) -> dict[str, float]:
    """Return a metric row without timings: equal rows mean equal computation."""
    return {name: value for name, value in row.items() if name not in METRICS or not METRICS[name].is_timing}


def _is_finite_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
