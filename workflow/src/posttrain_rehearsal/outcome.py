"""The result of a rehearsal, as JSON and as a page."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.config.derived import takes_turns
from posttrain.config.load import Resolved
from posttrain.config.schema import Config
from posttrain.plan.flags.env_conflicts import environments, find_env_conflicts, inherited_by_all
from posttrain.plan.rehearsal_record import digest, lengths_digest
from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.memory_phases import PhaseMemory, phase_memory
from posttrain.plan.sizing.untracked_memory import untracked_terms
from posttrain.report.report_page import render_page
from posttrain.report.verdict import Finding, Verdict
from posttrain_rehearsal.named_stand_ins import STAND_INS
from posttrain_rehearsal.rank_subset import is_quick, stage_size, stages_of
from posttrain_rehearsal.sampled_shapes import rehearsed_row, sampled_shapes_of
from posttrain_rehearsal.traces import ACTIVATIONS, LeftOut, Trace, find_problems

# The plan's terms for engines, which are absent here, and for memory that no tracker measures.
ENGINES = ("engine_weights", "kv_pool", "engine_work", "engine_routes")
UNSEEN = ("reserve", "fragmentation", *ENGINES)
# Phases that the plan computes tensor by tensor, and the step with full rows and the optimizer's state.
PLANNED_PHASES, FULL_STEP = ("rollout", "old_logprobs", "mismatch", "train"), 2
# A rank may exceed the plan by this much.
UNPLANNED_SHARE, UNPLANNED_GIB = 0.05, 0.5


def outcome(resolved: Resolved, rehearsed: Config, traces: Sequence[Trace], seconds: float) -> dict[str, Any]:
    """Return the content of the JSON.

    Args:
        resolved: The configuration.
        rehearsed: The configuration, reduced to the rehearsed layers.
        traces: Traces of all ranks.
        seconds: The rehearsal's duration.
    """
    drawn = sampled_shapes_of(resolved)
    planned, whole, rehearsed_awake, awake = (
        phase_memory(config, drawn.assumptions, rehearsed_row(config), trainer_sleeps)
        for trainer_sleeps in (True, False)
        for config in (rehearsed, resolved.config)
    )
    reserved = next((row.gpu.get("reserve", 0.0) for row in planned), 0.0)
    added, begun = (
        {(row.stage, row.phase): _seen(all_layers) - _seen(row) for row, all_layers in zip(*pair, strict=True)}
        for pair in ((planned, whole), (rehearsed_awake, awake))
    )

    def left_out(rank: int, phase: str) -> float:
        stage = rank // stage_size(rehearsed)
        # Before the first step, use the terms of its first phase.
        return added.get((stage, phase), begun[stage, "rollout"])

    return {
        "run": resolved.run,
        "digest": digest(resolved),
        "seconds": round(seconds, 1),
        "layers": rehearsed.model.architecture.num_hidden_layers,
        "of_layers": resolved.config.model.architecture.num_hidden_layers,
        "stages": stages_of(resolved.config, is_quick(resolved)),
        "of_stages": resolved.config.parallel.pipeline_model_parallel_size,
        "ranks": [trace.rank for trace in traces],
        "problems": [
            problem.as_dict()
            for problem in (
                *find_env_conflicts(resolved.config, inherited_by_all(os.environ)),
                *find_problems(rehearsed, traces, reserved, left_out),
            )
        ],
        "errors": {str(trace.rank): dict(trace.error) for trace in traces if trace.error},
        "memory": [row for trace in traces for row in _memory_rows(rehearsed, trace, planned, left_out)],
        "reserved_gib": round(reserved, 2),
        # Engines that take turns with the trainer leave only memory that the plan counts in every phase.
        "engines_gib": 0.0 if takes_turns(resolved.config) else round(max(map(_of_engines, whole)), 2),
        "unseen": [asdict(term) for term in untracked_terms(resolved.config)],
        "capacity_gib": resolved.config.hardware.memory_gib_per_gpu,
        "assumed": {
            "expert_imbalance": drawn.assumptions.expert_imbalance,
            "lengths": drawn.lengths_file,
            "lengths_digest": lengths_digest(drawn.lengths_file),
        },
        "collectives": _collectives(rehearsed, traces),
        "waits": _waits(traces),
        "environment": _environment(resolved.config),
        "stand_ins": dict(STAND_INS),
    }


def _of_engines(row: PhaseMemory) -> float:
    return sum(row.gpu.get(part, 0.0) for part in ENGINES)


def _seen(row: PhaseMemory) -> float:
    return sum(size for part, size in row.gpu.items() if part not in UNSEEN)


def _memory_rows(
    config: Config, trace: Trace, planned: Sequence[PhaseMemory], left_out: LeftOut
) -> list[dict[str, Any]]:
    stage = trace.rank // stage_size(config)
    # A storage gets its label at the end of the phase that creates it.
    kind_of = {where: kind for phase in trace.phases for kind, where, _ in phase["holders"] if kind != ACTIVATIONS}
    rows = []
    for phase in trace.phases:
        plan = next((row for row in planned if (row.phase, row.stage) == (phase["name"], stage)), None)
        awake = plan and _seen(plan)
        holders: dict[str, int] = defaultdict(int)
        for kind, where, size in phase["holders"]:
            holders[kind_of.get(where, kind)] += size
        largest = sorted(phase["holders"], key=lambda holder: -holder[2])[:5]
        rows.append(
            {
                "rank": trace.rank,
                "stage": stage,
                "step": phase["step"],
                "phase": phase["name"],
                "peak_gib": round(phase["peak"] / GIB, 3),
                "whole_gib": round(phase["peak"] / GIB + left_out(trace.rank, phase["name"]), 3),
                "planned_gib": awake and round(awake, 3),
                "host_gib": round(phase["host_peak"] / GIB, 3),
                "parts_gib": {kind: round(size / GIB, 3) for kind, size in holders.items()},
                "largest": [[kind, where, round(size / GIB, 3)] for kind, where, size in largest],
                "tflop": round(phase["flops"] / 1e12, 3),
                "moved_gb": round(phase["moved"] / 1e9, 1),
                "kernels": phase["kernels"],
                "waits": sum(phase["waits"].values()),
            }
        )
    return rows


def _collectives(config: Config, traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return calls and bytes of each stage's first rank, by phase, call and group."""
    rows: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for trace in traces:
        if trace.rank % stage_size(config):
            continue
        for call in trace.calls:
            nodes = {rank // config.hardware.gpus_per_node for rank in call.ranks}
            link = "one node" if len(nodes) == 1 else f"{len(nodes)} nodes"
            row = rows[trace.rank // stage_size(config), call.phase, call.name, len(call.ranks), link]
            row[0] += 1
            row[1] += call.bytes
    names = ("stage", "phase", "call", "ranks", "link")
    return [dict(zip(names, key, strict=True)) | {"calls": n, "bytes": size} for key, (n, size) in rows.items()]


def _waits(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the host's waits for the device in a step, most frequent first; the maximum over ranks."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for trace in traces:
        for phase in trace.phases:
            if phase["step"] == 1:
                for place, count in phase["waits"].items():
                    counts[phase["name"], place] = max(counts[phase["name"], place], count)
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [{"phase": phase, "place": place, "times": count} for (phase, place), count in ordered]


def _environment(config: Config) -> list[dict[str, str]]:
    """Return each kind of process's variables: those of its launcher, and those inherited from this shell."""
    rows = []
    for kind, flags in environments(config).items():
        of_shell = {name: (value, "this shell") for name, value in inherited_by_all(os.environ).items()}
        own = {item.name: (str(item.value), ", ".join(item.keys) or item.reason) for item in flags}
        for name, (value, origin) in sorted((of_shell | own).items()):
            rows.append({"process": kind, "name": name, "value": value, "from": origin})
    return rows


def judge(outcome: Mapping[str, Any]) -> Verdict:
    """Return the verdict: problems, or else warnings."""
    findings = [
        Finding("bad", f"{row['key']} = {row['value']}", f"allowed: {row['allowed']}", row["remedy"])
        for row in outcome["problems"]
    ]
    if findings:
        return Verdict("This would fail on GPUs", findings)
    findings = [*_may_not_fit(outcome), *_not_released(outcome), *_not_planned(outcome)]
    shown = (
        f"{outcome['layers']} of {outcome['of_layers']} layers"
        if outcome["layers"] < outcome["of_layers"]
        else "all layers"
    )
    if len(outcome["stages"]) < outcome["of_stages"]:
        stages = ", ".join(map(str, outcome["stages"]))
        shown += f" and stages {stages} of {outcome['of_stages']} (quick=1; the others are like stage 1)"
    return Verdict(f"Two steps of {len(outcome['ranks'])} ranks ran through, with {shown}", findings)


def _may_not_fit(outcome: Mapping[str, Any]) -> Iterator[Finding]:
    counted, most = (sum(term[name] for term in outcome["unseen"]) for name in ("gib", "most"))
    used = max(row["whole_gib"] for row in outcome["memory"]) + counted
    if used + most - counted > outcome["capacity_gib"]:
        detail = (
            f"{used:.1f} of {outcome['capacity_gib']} GiB, of which up to {most - counted:.1f} more are not seen here"
        )
        yield Finding("warning", "It may fit, and may not", detail, "fewer tokens, more nodes or another layout")


def _not_released(outcome: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning if a rank and its GPU's engines together exceed the GPU's memory, and neither releases any."""
    row = max(outcome["memory"], key=lambda row: row["whole_gib"])
    used = row["whole_gib"] + outcome["reserved_gib"]
    if used <= outcome["capacity_gib"] < used + outcome["engines_gib"]:
        detail = (
            f"{used:.1f} GiB of rank {row['rank']} in {row['phase']} and {outcome['engines_gib']:.1f} of engines, on a "
            f"GPU of {outcome['capacity_gib']}: neither releases any"
        )
        remedy = "give engines less (engine.mem_fraction_static), or the job more nodes"
        yield Finding("warning", "Engines keep their memory while ranks train", detail, remedy)


def _not_planned(outcome: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning if a rank holds more than planned, for example because a tensor is kept by mistake."""
    rows = [row for row in outcome["memory"] if row["step"] == FULL_STEP and row["phase"] in PLANNED_PHASES]
    row = max(rows, key=lambda row: row["peak_gib"] - row["planned_gib"], default=None)
    if row and row["peak_gib"] - row["planned_gib"] > max(UNPLANNED_GIB, UNPLANNED_SHARE * row["planned_gib"]):
        detail = f"rank {row['rank']} in {row['phase']}: {row['peak_gib']:.1f} GiB, planned {row['planned_gib']:.1f}"
        yield Finding("warning", "It holds more than is planned", detail, "the table of memory names what holds most")


def render(outcome: Mapping[str, Any], title: str) -> str:
    """Return the page."""
    return render_page("rehearsal.html.j2", outcome=outcome, verdict=judge(outcome), title=title)
