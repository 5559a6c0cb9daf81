"""The report of a run: one HTML file that opens from the file system, without a network.

`report_data` reads what the run left, `report_summary` condenses it, `report_figures` chooses the charts,
`report_charts` and `report_dag` draw them, and the template sets the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from posttrain.config.schema import EXPERIMENT_SECTIONS, Config
from posttrain.plan.rule_chain import RuleNode, rule_chain
from posttrain.readable import as_text, format_seconds
from posttrain.report import report_figures
from posttrain.report.coverage_map import coverage_map
from posttrain.report.report_dag import RuleState, draw_chain
from posttrain.report.report_data import RunData, flat_config
from posttrain.report.report_page import render_page
from posttrain.report.report_summary import rewards_in_words
from posttrain.report.suite_results import suite_rows
from posttrain.report.verdict import Verdict
from posttrain.store.format_versions import CURRENT_RULES
from posttrain.store.weight_formats import OTHER_QUANTISED
from posttrain.types import label_text

# Characters of a prompt or response that are shown folded, and of all of them together when unfolded.
SHOWN_CHARACTERS, ALL_CHARACTERS = 400, 1_400_000


@dataclass(frozen=True)
class ConfigRow:
    """One configuration value, as shown on the page."""

    key: str
    value: str
    origin: str

    @property
    def is_chosen(self) -> bool:
        """Whether the user set the value for this run."""
        return self.origin == "set=" or self.origin.startswith("--config")


@dataclass(frozen=True)
class PromptSamples:
    """The responses to one held-out prompt before and after training."""

    prompt: str
    label: str
    before: Sequence[Mapping[str, Any]]
    after: Sequence[Mapping[str, Any]]

    @property
    def change(self) -> str:
        """Return whether the mean reward rose, fell or stayed."""
        before, after = _mean_reward(self.before), _mean_reward(self.after)
        return "better" if after > before else "worse" if after < before else "same"


def render_report(run: RunData, summary: Mapping[str, Any], verdict: Verdict) -> str:
    """Return the report as one HTML page; the report of an unfinished run shows what exists so far."""
    samples = pair_samples(*((result or {}).get("examples", ()) for result in (run.before, run.after)))
    rules = rule_chain(run.config, is_fork=bool(run.lineage))
    return render_page(
        "report.html.j2",
        run=run,
        summary=summary,
        verdict=verdict,
        rewards={when: found for when in ("before", "after") if (found := rewards_in_words(summary, when))},
        num_wanted=run.config.training.num_steps,
        written=f"{datetime.fromtimestamp(run.read_unix, UTC):%Y-%m-%d %H:%M:%S} UTC",
        chain=draw_chain(rules, rule_states(run, rules)),
        rule_seconds=sorted(summary["seconds_by_rule"].items(), key=lambda item: -item[1]),
        rule_memory=_memory_by_rule(run),
        sections=_chart_sections(run),
        missing=report_figures.missing_metrics(run),
        suites=suite_rows(run),
        coverage_map=coverage_map(run.coverage["all"]) if run.coverage else None,
        samples=samples,
        frame=common_frame([pair.prompt for pair in samples]),
        changes={change: sum(pair.change == change for pair in samples) for change in ("better", "same", "worse")},
        shown_characters=SHOWN_CHARACTERS,
        most_characters=ALL_CHARACTERS // max(1, sum(1 + len(pair.before) + len(pair.after) for pair in samples)),
        attempts=[describe_attempt(row) for row in run.attempts],
        config_sections=config_rows(run.config, run.origins),
        experiment_sections=EXPERIMENT_SECTIONS,
    )


def rule_states(run: RunData, rules: Sequence[RuleNode]) -> dict[str, RuleState]:
    """Return the state of each rule of the chain: done, with its seconds, or not run."""
    steps = {artefact.receipt.step for artefact in run.artefacts if artefact.receipt is not None}
    made = {CURRENT_RULES.get(step, step) for step in steps} - {"evaluate"}
    made |= {f"evaluate {when}" for when in ("before", "after") if getattr(run, when) is not None}
    made |= set() if run.missing else {"render_report"}
    # Single checkpoints of a training and parts of an export have receipts before the whole is finished.
    made -= {"train"} if "the end of training" in run.missing else set()
    made -= {"export_hf"} if "the export" in run.missing else set()
    for when, (use, _) in OTHER_QUANTISED.items():
        made |= {f"quantize {when}"} if made & {use.step, use.finalize_step} else set()
        made |= {f"finalize_quantized {when}"} if use.finalize_step in made else set()
    states = {}
    for rule in rules:
        when = rule.name.partition(" ")[2]
        seconds = [time.seconds for time in run.times if time.rule == rule.rule and _is_of(time.job, rule)]
        is_done = rule.name in made or (bool(seconds) and not when)
        states[rule.name] = RuleState("done" if is_done else "not run", sum(seconds) if is_done and seconds else None)
    return states


def _is_of(job: str, rule: RuleNode) -> bool:
    """Return whether a job made this artefact: an evaluation's job ends in before or after, others in the folder."""
    when = rule.name.partition(" ")[2]
    if rule.rule == "evaluate":
        return job.endswith(when)
    return when == next((name for name, (_, folder) in OTHER_QUANTISED.items() if f".{folder}-" in job), "")


def pair_samples(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[PromptSamples]:
    """Return the sampled responses by prompt, in the order of the evaluation before training."""
    prompts: dict[str, tuple[str, list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for example in before:
        prompts.setdefault(example["prompt"], (label_text(example["label"]), [], []))[1].append(example)
    for example in after:
        prompts.setdefault(example["prompt"], (label_text(example["label"]), [], []))[2].append(example)
    return [PromptSamples(prompt, *rest) for prompt, rest in prompts.items()]


def describe_attempt(row: Mapping[str, Any]) -> dict[str, str]:
    """Return one row of `attempts.jsonl` as text: number, start, duration, outcome and remaining fields."""
    started, ended = row["started_unix"], row["ended_unix"]
    known = {
        "attempt": str(row["attempt"]),
        "started (UTC)": f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%S}",
        "lasted": format_seconds(ended - started),
        "ended": str(row["reason"]),
    }
    shown = {"attempt", "started_unix", "ended_unix", "reason"}
    return known | {key.replace("_", " "): as_text(value) for key, value in row.items() if key not in shown}


def common_frame(prompts: Sequence[str]) -> tuple[str, str]:
    """Return the common beginning and end of all prompts, which is the chat template; the page shows it only once.

    Both end at a space or at the end of a tag, so that no word or number is split.

    Example:
        ["<user>sort 31 now", "<user>sort 35 now"] -> ("<user>sort ", " now").
    """
    if len(prompts) < 2:
        return "", ""
    prefix = _common_prefix(prompts)
    prefix = prefix[: max((index + 1 for index, letter in enumerate(prefix) if letter in " \n>"), default=0)]
    rests = [prompt[len(prefix) :][::-1] for prompt in prompts]
    suffix = _common_prefix(rests)[::-1]
    return prefix, suffix[
        min((index for index, letter in enumerate(suffix) if letter in " \n<"), default=len(suffix)) :
    ]


def _common_prefix(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    differs = (index for index, letter in enumerate(first) if not last.startswith(letter, index))
    return first[: next(differs, len(first))]


def config_rows(config: Config, origins: Mapping[str, str]) -> dict[str, list[ConfigRow]]:
    """Return section -> its values with their origins."""
    sections: dict[str, list[ConfigRow]] = {}
    for key, value in flat_config(config).items():
        section = key.partition(".")[0]
        sections.setdefault(section, []).append(ConfigRow(key, as_text(value), origins.get(key, "schema default")))
    return sections


def _chart_sections(run: RunData) -> list[dict[str, Any]]:
    sections = {
        "Learning": ("What the rewards say, step by step.", report_figures.learning_charts(run)),
        "Trainer against engine": (
            "The engine samples and the trainer learns; both must give a token the same probability.",
            report_figures.mismatch_charts(run),
        ),
        "Responses and updates": (
            "What was sampled, how well it packs, and what the updates did to the policy.",
            [*report_figures.batch_charts(run), *report_figures.optimization_charts(run)],
        ),
        "Episodes": (
            "What the model did in its environment, and where the time of an episode went.",
            report_figures.episode_charts(run),
        ),
        "Queue": (
            "Engines generate while the trainer trains: how old the tokens are, and how many groups wait.",
            report_figures.queue_charts(run),
        ),
        "Time": ("Where the seconds went.", report_figures.time_charts(run)),
    }
    return [
        {
            "title": title,
            "note": note,
            "charts": [chart for chart in charts if chart not in flat],
            "flat": [report_figures.in_words(chart) for chart in flat],
        }
        for title, (note, charts) in sections.items()
        if charts
        for flat in [[chart for chart in charts if chart.is_flat and chart.x_label == "step"]]
    ]


def _memory_by_rule(run: RunData) -> dict[str, float]:
    memory: dict[str, float] = {}
    for time in run.times:
        if time.max_rss_mb is not None:
            memory[time.rule] = max(memory.get(time.rule, 0.0), time.max_rss_mb * 1e6)
    return memory


def _mean_reward(samples: Sequence[Mapping[str, Any]]) -> float:
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return sum(rewards) / max(1, len(rewards))
