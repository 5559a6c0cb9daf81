"""The verdict of a run: whether it learned, and findings that put its numbers in doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from posttrain.config.derived import mismatch_limits
from posttrain.config.suites import HELD_OUT
from posttrain.readable import MINUS, counted, format_number, format_percent
from posttrain.report.intervals import Change, rate_change, reward_change
from posttrain.report.report_data import RunData
from posttrain.report.suite_results import suite_rows

# From the worst to the best, with the terminal's colour.
LEVELS = {"bad": "bold red", "warning": "yellow", "unknown": "bold", "good": "green"}
# Mismatch metrics of the weights that the engines received.
SERVED = "mismatch/abs_diff_mean"
# With the right weights, rounding may exceed the limit in this share of steps, by at most this factor; wrong weights
# exceed it sevenfold.
RARE, ROUNDED_AT_MOST = 0.05, 2
# If the share of groups with equal rewards is this large, nearly all sampling is wasted.
LITTLE_TO_LEARN = 0.9
# Number of first and of last steps whose mean reward is shown if there is no evaluation.
FEW_STEPS = 10


@dataclass(frozen=True)
class Finding:
    """One finding about a run.

    Args:
        level: A key of `LEVELS`.
        title: A few words.
        detail: A sentence with numbers.
        remedy: What the user can do; "" if nothing.
    """

    level: str
    title: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Verdict:
    """The summary at the top of a page.

    Args:
        headline: One line.
        findings: Findings, the worst first.
    """

    headline: str
    findings: Sequence[Finding]

    @property
    def level(self) -> str:
        """The level of the worst finding; good if there is none."""
        return min((finding.level for finding in self.findings), key=[*LEVELS].index, default="good")

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as in `summary.json`."""
        findings = [asdict(finding) for finding in self.findings]
        return {"level": self.level, "headline": self.headline, "findings": findings}

    def print(self) -> None:
        """Print the verdict on stdout."""
        console = Console(highlight=False, soft_wrap=True)
        console.print(self.headline, style=LEVELS[self.level], markup=False)
        for finding in self.findings:
            remedy = f"\n    {finding.remedy}" if finding.remedy else ""
            title = "" if finding.title == self.headline else f"{finding.title}: "
            console.print(f"  {title}{finding.detail}{remedy}", markup=False)


def judge_run(run: RunData) -> Verdict:
    """Return the verdict of a run, finished or not."""
    rewards, learning = _rewards(run), _learning(run)
    if any(finding.level == "bad" for finding in rewards):
        # No reward signal implies that nothing changed, so the finding of no change would only repeat it.
        learning = [finding for finding in learning if finding.level == "bad"]
    found = [*rewards, *_mismatch(run), *_left_out(run), *_unchecked(run), *learning, *_regressions(run)]
    findings = sorted(found, key=lambda finding: [*LEVELS].index(finding.level))
    return Verdict(findings[0].title, findings)


def _learning(run: RunData) -> list[Finding]:
    if run.before is None or run.after is None:
        measured = {"reward": run.values("rollout/reward_mean"), "perplexity": run.values("train/perplexity")}
        so_far = [_so_far(name, values) for name, values in measured.items() if values] or [_so_far("reward", [])]
        return [Finding("unknown", "Not known yet whether it learns", so_far[0])]
    results = run.before, run.after
    rate, reward = rate_change(*results), reward_change(*results)
    prompts = f" on {counted(run.after['num_prompts'], 'held-out prompt')}"
    detail, passes = _rate_in_words(*results, rate, prompts), _rate_in_words(*results, rate)
    if reward:
        detail = "; ".join([_reward_in_words(*results, reward, prompts), passes, *_scores_in_words(*results)])
    _, low, high = reward or rate
    if high < 0:
        remedy = "the model as it came is the better one; a lower optimizer.lr or fewer steps may help"
        return [Finding("bad", "The model got worse", detail, remedy)]
    found = Finding("good", "The model got better", detail)
    if low <= 0:
        remedy = "train longer, or measure with more data.num_heldout_prompts"
        found = Finding("warning", "No statistically significant change", detail, remedy)
    if rate[2] >= 0:
        return [found]
    remedy = "the reward pays for something else than right answers: look at its parts and at the samples"
    return [found, Finding("warning", "Fewer responses pass", passes, remedy)]


def _rate_in_words(before: Mapping[str, Any], after: Mapping[str, Any], rate: Change, prompts: str = "") -> str:
    rates = " → ".join(format_percent(result["pass_rate"]) for result in (before, after))
    change, low, high = (_with_minus(f"{100 * value:+.1f}") for value in rate)
    return f"pass rate {rates}{prompts}: {change} points, with 95 % confidence {low} to {high}"


def _reward_in_words(before: Mapping[str, Any], after: Mapping[str, Any], reward: Change, prompts: str) -> str:
    rewards = _with_minus(f"{before['reward_mean']:.3f} → {after['reward_mean']:.3f}")
    change, low, high = (_with_minus(f"{value:+.3f}") for value in reward)
    return f"mean reward {rewards}{prompts}: {change}, with 95 % confidence {low} to {high}"


def _scores_in_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the mean score of each grader, if the reward has several."""
    old, new = before.get("scores", {}), after.get("scores", {})
    return [f"{name} " + _with_minus(f"{old[name]:.3f} → {new[name]:.3f}") for name in old if name in new]


def _with_minus(numbers: str) -> str:
    return numbers.replace("-", MINUS)


def _unchecked(run: RunData) -> list[Finding]:
    if run.export_check and run.export_check["check"] == "off":
        detail = "export.check=off: transformers has not loaded it, and nothing was compared with the trainer"
        remedy = "run `snakemake check_export` with export.check=auto"
        return [Finding("warning", "The export was not checked", detail, remedy)]
    return []


def _regressions(run: RunData) -> list[Finding]:
    """Return a finding if suites got significantly worse; `_learning` covers the held-out prompts."""
    findings = []
    for row in suite_rows(run):
        if row.name != HELD_OUT and row.measured[-1].when in row.worse:
            first, last = row.measured[0].result, row.measured[-1].result
            detail = _rate_in_words(first, last, rate_change(first, last))
            remedy = "see its curve: an earlier checkpoint may be the better one"
            findings.append(Finding("warning", f"Worse at {row.name}", detail, remedy))
    return findings


def _so_far(name: str, values: Sequence[float]) -> str:
    few = min(FEW_STEPS, len(values) // 2)
    if not few:
        return f"{counted(len(values), 'step')}, and not both evaluations"
    first, last = (math.fsum(part) / few for part in (values[:few], values[-few:]))
    return f"mean {name} {first:.3f} in the first {counted(few, 'step')}, {last:.3f} in the last"


def _rewards(run: RunData) -> list[Finding]:
    """Return a finding if most groups have equal rewards, so that their advantages are 0."""
    shares, rewards = run.values("rollout/reward_std_zero_fraction"), run.values("rollout/reward_mean")
    mean = math.fsum(shares) / len(shares) if shares else 0.0
    if mean < LITTLE_TO_LEARN:
        return []
    steps, low, high = counted(len(shares), "step"), min(rewards), max(rewards)
    spread = f"every reward was {format_number(low)}"
    if low < high:
        spread = f"mean rewards of {format_number(low)} to {format_number(high)}"
    if high == 0:
        remedy = "`posttrain check-data` tells whether data.reward can read the labels; then look at the samples"
    else:
        remedy = "take prompts that the model gets right now and then, or raise rollout.num_samples_per_prompt"
    if mean == 1:
        detail = f"in all of {steps} the rewards of each group were equal, so no sample changed a weight; {spread}"
        return [Finding("bad", "Nothing was learned", detail, remedy)]
    detail = f"over {steps}, {format_percent(mean)} of all groups had equal rewards; {spread}"
    return [Finding("warning", "Hardly anything to learn from", detail, remedy)]


def _mismatch(run: RunData) -> list[Finding]:
    own, served = mismatch_limits(run.config)
    has_served, findings = 0 <= max(run.values(SERVED), default=-1) <= served, []
    for metric, limit, weights in (
        ("mismatch/quantised_abs_diff_mean", own, "with the trainer's own weights"),
        (SERVED, served, "with the weights served"),
    ):
        steps, values = run.column(metric)
        far = [step for step, value in zip(steps, values, strict=True) if value > limit]
        if far:
            detail = (
                f"mean |trainer {MINUS} engine| {weights} was above {format_number(limit)} nats in {len(far)} of "
                f"{counted(len(steps), 'measured step')}, first in step {format_number(far[0])}; the largest was "
                f"{format_number(max(values))}"
            )
            is_rare = len(far) <= len(steps) * RARE and max(values) <= ROUNDED_AT_MOST * limit
            if metric != SERVED and run.config.rollout.fp8 and has_served and is_rare:
                remedy = "one step may be chance; rollout.fp8=false, or more layers left as they are, keeps them closer"
                findings.append(Finding("warning", "Rounded weights were far from the policy", detail, remedy))
                continue
            remedy = (
                "an engine had other weights than it should, or computes something else: see its logs in train/attempts"
                "; trainer.mismatch has the limits"
            )
            findings.append(Finding("bad", "The engine did not sample from the policy", detail, remedy))
    return findings


def _left_out(run: RunData) -> list[Finding]:
    findings = []
    if skipped := max(run.values("train/non_finite_steps"), default=0):
        detail = f"{counted(int(skipped), 'update')} had a loss or gradient that is not finite, and changed nothing"
        findings.append(Finding("warning", "Updates were left out", detail, "a lower optimizer.lr may help"))
    if failed := sum(run.values("rollout/grader_failures")):
        detail = f"{counted(int(failed), 'response')} could not be graded, and changed nothing"
        remedy = "the samples in train/rollouts say why; reward.deadline_seconds and reward.memory_gib are the limits"
        findings.append(Finding("warning", "Graders failed", detail, remedy))
    return findings
