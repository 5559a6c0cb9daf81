"""The charts of the report. A chart whose metrics were not recorded is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.config.derived import mismatch_limits
from posttrain.readable import format_number, format_percent, format_tick
from posttrain.report.distributions import CURVE
from posttrain.report.metrics import FAMILIES, METRICS, percentile_name
from posttrain.report.report_charts import Chart, Series
from posttrain.report.report_data import RunData

PHASES = {
    "perf/rollout_seconds": "rollout",
    "perf/evaluation_seconds": "evaluation",
    "perf/mismatch_seconds": "mismatch check",
    "perf/old_logprobs_seconds": "old log-probs",
    "perf/train_seconds": "train",
    "perf/weight_sync_seconds": "weight sync",
    "perf/save_seconds": "checkpoint",
    "perf/asleep_seconds": "taking turns",
}
NUM_COLORS = 7
AGE = "queue/age_"
P90_NOTE = "Means over the step's episodes; dashed: 90 % of them have at most this."
# What is on the x axis of a distribution.
PERCENTILE = "percentile"
PHASE_COLORS = (1, 8, 7, 6, 2, 3, 5, 4)


@dataclass(frozen=True)
class Line:
    """One metric of a chart."""

    metric: str
    label: str
    color: int = 1
    smooth: bool = False
    is_dashed: bool = False


def learning_charts(run: RunData) -> list[Chart]:
    """Reward, pass rate, and the share of groups with a learning signal."""
    identical = Line("rollout/reward_std_zero_fraction", "all rewards equal", 6, smooth=True)
    return _present(
        _reward_chart(run),
        _family_chart(run, "Pass rate by source", "share", "source/", "/pass_rate"),
        *_suite_charts(run),
        _family_chart(run, "Scores", "mean score", "reward/"),
        _chart(run, "Groups with identical rewards", "share of groups", [identical], low=0.0, high=1.0),
    )


def batch_charts(run: RunData) -> list[Chart]:
    """Lengths of the samples, and how well they pack."""
    longest = Line("rollout/response_tokens_max", "longest", 7, is_dashed=True)
    mean = Line("rollout/response_tokens_mean", "mean", 1)
    cut = f"Mean and longest response of each step; cut at {run.config.rollout.max_response_tokens:,} tokens."
    truncated = Line("rollout/truncated_fraction", "truncated", 5, smooth=True)
    padding = Line("train/padding_fraction", "padding", 3)
    return _present(
        _chart(run, "Response length", "tokens", [longest, mean], cut, low=0.0),
        _chart(run, "Truncated responses", "share", [truncated], low=0.0),
        _chart(run, "Padding", "share", [padding], low=0.0),
    )


def episode_charts(run: RunData) -> list[Chart]:
    """Turns, calls and observations of episodes, and their time in environments and engines: means and percentiles."""
    turns = _mean_and_p90("episode/turns", "responses", 1)
    calls = _mean_and_p90("episode/tool_calls", "calls of functions", 3)
    segments = [Line("episode/segments", "segments", 7)] if max(run.values("episode/segments"), default=1) > 1 else []
    read = _mean_and_p90("episode/observed_tokens", "tokens", 2)
    acting = _mean_and_p90("perf/environment_seconds", "in the environment", 5)
    decoding = _mean_and_p90("perf/engine_seconds", "in engines", 1)
    cached = Line("perf/prefix_hit_rate", "in the prefix cache", 6)
    note = "Time in engines includes waiting for a place and for new weights. " + P90_NOTE
    read_note = "Tokens read after the first response, not trained on. " + P90_NOTE
    return _present(
        _chart(run, "Turns of an episode", "number", [*turns, *calls, *segments], P90_NOTE, low=0.0),
        _chart(run, "Observations", "tokens", read, read_note, low=0.0),
        _chart(run, "Time of an episode", "s", [*acting, *decoding], note, is_log=True),
        _chart(run, "Prefix reuse", "share of read tokens", [cached], low=0.0),
        *_distribution_charts(run),
    )


def _mean_and_p90(metric: str, label: str, color: int) -> tuple[Line, Line]:
    return Line(metric, label, color), Line(percentile_name(metric, 90), f"{label}, p90", color, is_dashed=True)


def _distribution_charts(run: RunData) -> list[Chart | None]:
    """Return the distributions over held-out episodes of the last evaluation; older results have none."""
    when, result = ("after", run.after) if run.after else ("before", run.before)
    curves = (result or {}).get("episodes", {}).get("curves", {})
    note = f"Held-out episodes {when} training. At 90 on the x axis: 90 % of them have at most this."

    def chart(title: str, unit: str, *lines: tuple[str, str, int], is_log: bool = False) -> Chart | None:
        series = [Series(label, CURVE, curves[name], color) for name, label, color in lines if name in curves]
        low = None if is_log else 0.0
        return Chart(title, note, unit, series, low=low, is_log=is_log, x_label=PERCENTILE) if series else None

    return [
        chart("Distribution of turns", "number", ("turns", "responses", 1), ("tool_calls", "calls of functions", 3)),
        chart("Distribution of observations", "tokens", ("observed_tokens", "tokens", 2)),
        chart("Distribution of time", "s", ("environment_seconds", "in the environment", 5),
              ("engine_seconds", "in engines", 1), is_log=True),
    ]  # fmt: skip


def queue_charts(run: RunData) -> list[Chart]:
    """How old the trajectories are when they are trained on, and how full the queue is."""
    bound = f"Age in updates; at most {run.config.rollout.max_staleness} (rollout.max_staleness)."
    oldest = Line("queue/staleness_max", "oldest token", 7, is_dashed=True)
    mean = Line("queue/staleness_mean", "mean", 1)
    ready, running = Line("queue/groups_ready", "ready", 3), Line("queue/groups_running", "being generated", 6)
    return _present(
        _chart(run, "Staleness", "updates", [oldest, mean], bound, low=0.0),
        _age_chart(run),
        _chart(run, "Queue", "groups", [ready, running], low=0.0),
    )


def optimization_charts(run: RunData) -> list[Chart]:
    """Loss, gradient norm and clipping of the updates."""
    loss = Line("train/loss", "loss", 1, smooth=True)
    clipped = Line("train/clip_fraction", "clipped", 4, smooth=True)
    drift = Line("train/approx_kl", "approximate KL", 3, smooth=True)
    entropy = Line("train/entropy", "entropy", 1, smooth=True)
    ratio = Line("train/importance_ratio_mean", "mean ratio", 6)
    first = Line("train/first_update_ratio_max_abs_deviation", "largest deviation", 5)
    # A constant rate is in the configuration; only a schedule needs a chart.
    rate = [Line("train/lr", "learning rate", 7)] if len(set(run.values("train/lr"))) > 1 else []
    return _present(
        _chart(run, "Loss", "loss", [loss]),
        _chart(run, "Perplexity", "exp(nats)", [Line("train/perplexity", "given responses", 4, smooth=True)]),
        _grad_norm_chart(run),
        _chart(run, "Entropy", "nats", [entropy], low=0.0),
        _chart(run, "Clip fraction", "share", [clipped], low=0.0),
        _chart(run, "Policy drift within a step", "nats", [drift]),
        _chart(run, "Importance ratio", "ratio", [ratio], references=[(1.0, "on policy")]),
        _chart(run, "First update's ratio, deviation from 1", "|ratio - 1|", [first], low=0.0),
        _chart(run, "Learning rate", "lr", rate, low=0.0),
    )


def mismatch_charts(run: RunData) -> list[Chart]:
    """Trainer against engine."""
    quantised = Line("mismatch/quantised_abs_diff_mean", "trainer's own weights", 2)
    largest = Line("mismatch/abs_diff_max", "weights served, largest", 7, is_dashed=True)
    served = Line("mismatch/abs_diff_mean", "weights served, mean", 1)
    note = (
        "Mean |difference| of log-probabilities per token: on the weights served (dequantised), and against "
        "the trainer's own weights, which shows what quantisation adds. Dotted: what is expected at most."
    )
    # The first limit is for the trainer's own weights; both may be equal.
    limits = [(limit, f"limit {format_tick(limit)}") for limit in dict.fromkeys(mismatch_limits(run.config))]
    sample_size = Line("mismatch/effective_sample_size", "effective sample size", 6)
    return _present(
        _chart(run, "Trainer against engine", "nats", [quantised, largest, served], note, limits, is_log=True),
        _chart(run, "KL of engine and trainer", "nats", [Line("mismatch/kl_k3", "k3", 3)], is_log=True),
        _chart(run, "Effective sample size", "share", [sample_size], high=1.0),
    )


def time_charts(run: RunData) -> list[Chart]:
    """The time of a step by phase."""
    speed = Line("perf/tokens_per_second", "tokens per second", 3, smooth=True)
    responses = Line("perf/response_tokens_per_second", "of responses alone", 2, smooth=True)
    note = "Tokens trained on, prompts and responses, per second of the whole step; and those of responses alone."
    return _present(_phase_chart(run), _chart(run, "Throughput", "tokens/s", [speed, responses], note, low=0.0))


def in_words(chart: Chart) -> str:
    """Return the text that replaces a chart without any change.

    Example:
        Response length with lines "longest" and "mean" -> "Response length: longest 5, mean 5".
    """
    if len(chart.series) == 1:
        return f"{chart.title}: {format_number(chart.series[0].values[0])}"
    return f"{chart.title}: " + ", ".join(f"{line.label} {format_number(line.values[0])}" for line in chart.series)


def missing_metrics(run: RunData) -> list[str]:
    """Return the metrics of the table that no step recorded."""
    recorded = {name for row in run.rows for name in row}
    return [name for name in METRICS if name not in recorded]


def _reward_chart(run: RunData) -> Chart | None:
    key, name = ("reward_mean", "mean reward") if run.has_partial_credit else ("pass_rate", "pass rate")
    show = format_number if run.has_partial_credit else format_percent
    evaluated = [
        (result[key], f"{when} {show(result[key])}")
        for when, result in (("before", run.before), ("after", run.after))
        if result is not None and result.get(key) is not None
    ]
    reward = run.values("rollout/reward_mean")
    lines = [Line("rollout/pass_rate", "pass rate", 1, smooth=True)]
    note = f"Training samples of each step; the dotted lines are the held-out {name}s."
    if reward == run.values("rollout/pass_rate"):
        note += " Rewards are 0 or 1, so this is the mean reward as well."
    else:
        lines.insert(0, Line("rollout/reward_mean", "mean reward", 2, smooth=True))
    low, high = min([0.0, *reward]), max([1.0, *reward])
    return _chart(run, "Reward and pass rate", "reward, share", lines, note, evaluated, low, high, is_wide=True)


def _suite_charts(run: RunData) -> list[Chart | None]:
    pass_rates = _family_chart(run, "Suites", "share", "evaluation/", "/pass_rate")
    if not run.has_partial_credit:
        return [pass_rates]
    return [pass_rates, _family_chart(run, "Mean reward of suites", "reward", "evaluation/", "/reward_mean")]


def _family_chart(run: RunData, title: str, unit: str, prefix: str, suffix: str = "") -> Chart | None:
    """Return a chart with one line for each of the metrics that differ in a name."""
    names = sorted({name for row in run.rows for name in row if name.startswith(prefix) and name.endswith(suffix)})
    lines = [
        Line(name, name.removeprefix(prefix).removesuffix(suffix), 1 + place % NUM_COLORS, smooth=True)
        for place, name in enumerate(names)
    ]
    return _chart(run, title, unit, lines, FAMILIES[prefix].doc + ".")


def _age_chart(run: RunData) -> Chart | None:
    """Return the shares of tokens by age, stacked; an age that a step does not name has no tokens."""
    rows = [row for row in run.rows if "queue/staleness_max" in row]
    ages = sorted({int(name.removeprefix(AGE)) for row in rows for name in row if name.startswith(AGE)})
    if not ages:
        return None
    steps = [row["step"] for row in rows]
    series = [
        Series(str(age), steps, [row.get(f"{AGE}{age}", 0.0) for row in rows], 1 + place % NUM_COLORS)
        for place, age in enumerate(ages)
    ]
    return Chart("Tokens by age in updates", FAMILIES[AGE].doc + ".", "share", series, low=0.0, is_stacked=True)


def _grad_norm_chart(run: RunData) -> Chart | None:
    clip = run.config.optimizer.clip_grad
    # A limit far above all norms would flatten the curve.
    is_near = any(value > 0.4 * clip for value in run.values("train/grad_norm"))
    limit = [(clip, "clipped")] if is_near else []
    line = Line("train/grad_norm", "gradient norm", 2, smooth=True)
    return _chart(run, "Gradient norm", "norm", [line], references=limit, low=0.0)


def _phase_chart(run: RunData) -> Chart | None:
    rows = [row for row in run.rows if "perf/step_seconds" in row]
    if not rows:
        return None
    # A phase that a step did not have (such as a mismatch check every 20 steps) took no time.
    phases = {metric: [row.get(metric, 0.0) for row in rows] for metric in PHASES}
    steps, totals = run.column("perf/step_seconds")
    named = [sum(values) for values in zip(*phases.values(), strict=True)]
    layers = [
        Series(label, steps, phases[metric], color)
        for (metric, label), color in zip(PHASES.items(), PHASE_COLORS, strict=True)
        if any(phases[metric])
    ]
    rest = [max(0.0, total - part) for total, part in zip(totals, named, strict=True)]
    note = "Seconds of each phase of a step, stacked; the top is the whole step."
    layers.append(Series("other", steps, rest, 4))
    return Chart("Time per step", note, "seconds", layers, low=0.0, is_stacked=True, is_wide=True)


def _chart(
    run: RunData,
    title: str,
    unit: str,
    lines: Sequence[Line],
    note: str = "",
    references: Sequence[tuple[float, str]] = (),
    low: float | None = None,
    high: float | None = None,
    is_log: bool = False,
    is_wide: bool = False,
) -> Chart | None:
    """Return a chart of the recorded lines, or None if none was recorded.

    The note defaults to the definition of the first line's metric.
    """
    recorded = [(line, *run.column(line.metric)) for line in lines]
    series = [
        Series(line.label, steps, values, line.color, line.smooth, line.is_dashed)
        for line, steps, values in recorded
        if steps
    ]
    if not series:
        return None
    note = note or METRICS[lines[0].metric].doc + "."
    return Chart(title, note, unit, series, references, low, high, is_log, is_wide=is_wide)


def _present(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
