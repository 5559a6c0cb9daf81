"""`summary.json`: a dozen numbers of the run, under stable names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.readable import format_cost, format_number, format_percent, format_seconds
from posttrain.report.cost import cost_part
from posttrain.report.report_data import RuleTime, RunData


def summarize(run: RunData) -> dict[str, Any]:
    """Return the content of `summary.json`; values that were not measured are null."""
    steps = run.values("perf/step_seconds")
    rates = {name: _per_second(run.values(f"train/num_{name}"), steps) for name in ("tokens", "response_tokens")}
    seconds_by_rule = sum_by_rule(run.times)
    return {
        "run": run.run_name,
        "model": run.config.model.name,
        "lineage": [{"run": ancestor["run"], "step": ancestor["step"]} for ancestor in run.lineage],
        "pass_rate_before": run.before and run.before["pass_rate"],
        "pass_rate_after": run.after and run.after["pass_rate"],
        **_heldout_rewards(run),
        "num_steps": run.num_steps,
        "mismatch_abs_diff_mean": _mean(run.values("mismatch/abs_diff_mean")),
        "mismatch_abs_diff_max": max(run.values("mismatch/abs_diff_max"), default=None),
        "mismatch_quantised_abs_diff_mean": _mean(run.values("mismatch/quantised_abs_diff_mean")),
        "first_update_ratio_max_abs_deviation": max(
            run.values("train/first_update_ratio_max_abs_deviation"), default=None
        ),
        "seconds_total": busy_seconds(run.times),
        "seconds_by_rule": seconds_by_rule,
        **{f"{name}_per_second": rate for name, rate in rates.items()},
        "final_weights_sha256": run.final_weights_sha256,
        "export_check": run.export_check,
        **cost_part(run.config, _gpu_jobs(run)),
    }


def _heldout_rewards(run: RunData) -> dict[str, Any]:
    """Return mean reward and mean score of each grader on held-out prompts.

    Null if all rewards are 0 or 1, because the mean is then the pass rate.
    """
    results = {"before": run.before or {}, "after": run.after or {}}
    return {
        f"{name}_{when}": result.get(name) if run.has_partial_credit else None
        for name in ("reward_mean", "scores")
        for when, result in results.items()
    }


def _gpu_jobs(run: RunData) -> list[tuple[str, float]]:
    """Return rule and seconds of each job; training occupies its GPUs in every attempt, not only in the last one."""
    attempts = [("train", row["ended_unix"] - row["started_unix"]) for row in run.attempts]
    return [*attempts, *((time.rule, time.seconds) for time in run.times if time.rule != "train")]


def sum_by_rule(times: Sequence[RuleTime]) -> dict[str, float]:
    """Return rule -> total seconds of its jobs, ordered by the time at which a rule's first job ended."""
    seconds: dict[str, float] = {}
    for time in sorted(times, key=lambda time: time.finished_unix):
        seconds[time.rule] = round(seconds.get(time.rule, 0.0) + time.seconds, 3)
    return seconds


def busy_seconds(times: Sequence[RuleTime]) -> float:
    """Return the seconds in which at least one job ran; concurrent jobs count once, pauses do not count.

    Example:
        Jobs over [0, 10], [5, 12] and [100, 101]: 13 seconds.
    """
    total, covered_until = 0.0, -math.inf
    for start, end in sorted((time.finished_unix - time.seconds, time.finished_unix) for time in times):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return round(total, 3)


def print_summary(summary: dict[str, Any]) -> None:
    """Print the summary as a table on stdout."""
    table = Table("", summary["run"], show_edge=False, header_style="bold")
    served, quantised = summary["mismatch_abs_diff_mean"], summary["mismatch_quantised_abs_diff_mean"]
    rows = {
        **{f"{name} before": value for name, value in rewards_in_words(summary, "before").items()},
        **{f"{name} after": value for name, value in rewards_in_words(summary, "after").items()},
        "pass rate before": format_percent(summary["pass_rate_before"]),
        "pass rate after": format_percent(summary["pass_rate_after"]),
        "steps": format_number(summary["num_steps"]),
        "trainer - engine, weights served": _nats(served),
        "trainer - engine, trainer's weights": _nats(quantised),
        "tokens per second, prompts included": format_number(summary["tokens_per_second"]),
        "response tokens per second": format_number(summary["response_tokens_per_second"]),
        "time, all rules": format_seconds(summary["seconds_total"]),
        "GPU-hours": format_number(summary["gpu_hours"]),
        "cost": format_cost(summary["cost"], summary["currency"]),
        **{f"  {rule}": format_seconds(seconds) for rule, seconds in summary["seconds_by_rule"].items()},
        "final weights sha256": summary["final_weights_sha256"] or "–",
    }
    for name, value in rows.items():
        if value != "–":
            table.add_row(name, value)
    Console(width=110).print(table)


def rewards_in_words(summary: Mapping[str, Any], when: str) -> dict[str, str]:
    """Return the held-out mean reward and its parts as text; nothing if the mean is the pass rate."""
    means = {"mean reward": summary[f"reward_mean_{when}"], **(summary[f"scores_{when}"] or {})}
    return {name: f"{mean:.3f}" for name, mean in means.items() if mean is not None}


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{format_number(value)} nats"


def _per_second(tokens: Sequence[float], seconds: Sequence[float]) -> float | None:
    return round(math.fsum(tokens) / math.fsum(seconds), 3) if seconds and tokens else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
