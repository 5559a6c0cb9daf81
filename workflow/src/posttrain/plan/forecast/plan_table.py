"""The plan as a table on stdout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.plan.forecast.plan_layout import TERMS
from posttrain.readable import (
    counted,
    format_bytes,
    format_cost,
    format_number,
    format_percent,
    format_seconds,
)

# Columns of a terminal beside an editor; layouts that leave the rest of the plan on one screen.
WIDTH = 110
SHOWN_LAYOUTS = 5


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the plan's main numbers and the rules."""
    console = Console(width=WIDTH, highlight=False)
    parts: list[tuple[Callable[[Any], Table], Any]] = [(_numbers, plan), (_phases, plan), (_layouts, plan)]
    parts += [
        (_step, plan["step"]),
        (_speculation, plan["speculation"]),
        (_step_choice, plan["step_choice"] or None),
        (_splits, plan["splits"] or None),
        (_asynchronous, plan["asynchronous"]),
        (_failures, plan["goodput"]),
        (_rules, plan),
    ]
    for draw, part in parts:
        if part is not None:
            console.print(draw(part), "")
    console.print(f"{len(plan['not_modelled'])} things are not modelled; the plan's page names them")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table; columns whose name begins with ">" are right-aligned."""
    table = Table(show_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _numbers(plan: Mapping[str, Any]) -> Table:
    model, engine, storage = plan["model"], plan["engine"], plan["storage"]
    cost = "" if plan["cost"] is None else f", {format_cost(plan['cost'], plan['currency'])}"
    rows = [
        ("parameters", f"{model['num_parameters']:,} ({model['num_active_parameters']:,} active)"),
        ("algorithm", plan["algorithm"]),
        *plan["ratios"].items(),
        ("layout", _layout(plan["parallelism"])),
        ("layers per stage", " ".join(map(str, plan["parallelism"]["layers_per_stage"]))),
        ("trainer GiB per rank, by stage", "  ".join(f"{gib:.4g}" for gib in plan["trainer"]["memory_gib_by_stage"])),
        *(_engines(engine) if engine["num_engines"] else ()),
        *(_own_nodes(plan, kind) for kind in plan["nodes"][1:]),
        *(_evaluation(plan["evaluation"]) if plan["evaluation"] else ()),
        *([_calibration(plan["calibration"])] if plan["calibration"] else []),
        ("shared storage", f"{format_bytes(storage['shared_bytes'])} ({format_number(storage['shared_bytes'])} bytes)"),
        ("each node's own disk", format_bytes(storage["node_local_bytes"])),
        *([] if plan["gpu_hours"] is None else [("GPU-hours", f"{format_number(plan['gpu_hours'])}{cost}")]),
    ]
    return _table(("", plan["run"]), rows)


def _engines(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a block for each kind of engine."""
    kinds = [("engine", engine)]
    if engine["prefill"]:
        kinds = [("prefill engine", engine["prefill"]), ("decode engine", engine)]
        sizes = (f"{kind['num_engines']} x {kind['gpus_per_engine']} GPUs" for _, kind in kinds)
        yield "engines", " prefill, ".join(sizes) + " decode"
    for name, kind in kinds:
        yield f"{name} GiB of weights per GPU", f"{kind['weights_gib_per_gpu']:.4g}"
        tokens = "not modelled" if kind["kv_tokens"] is None else f"at most {kind['kv_tokens']:,}"
        yield f"KV cache tokens per {name}", tokens


def _own_nodes(plan: Mapping[str, Any], kind: Mapping[str, Any]) -> tuple[str, str]:
    held = f"{kind['gpu_gib']:.4g} of {plan['trainer']['capacity_gib']:g} GiB per GPU in {kind['phase']}"
    return "engines' own nodes", f"{kind['nodes']}, {held}: {_verdict(kind)}"


def _evaluation(served: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    engines = f"{served['num_engines']} x {counted(served['gpus_per_engine'], 'GPU')}"
    weights = f"{served['weights_gib_per_gpu']:.4g} of {served['limit_gib_per_gpu']:.4g} GiB of weights per GPU"
    precision = "in FP8" if served["precision"] == "fp8" else "in the source's precision"
    yield "evaluations", f"{counted(served['nodes'], 'node')}, {engines} {precision}: {weights}"
    if rows := served["speed"]:
        speeds = (f"{row['output_tokens_per_second']:,.0f} with {row['concurrency']}" for row in rows)
        yield "tokens/s of one, by clients", ", ".join(speeds)


def _calibration(taken: Mapping[str, Any]) -> tuple[str, str]:
    parts = [counted(taken["nodes"], "node"), f"{taken['gib_per_rank']:.4g} GiB per rank"]
    parts += [] if taken["seconds"] is None else [f"at most {format_seconds(taken['seconds'])}"]
    return "a calibration, when asked for", ", ".join(parts)


def _layout(layout: Mapping[str, Any]) -> str:
    sizes = " ".join(f"{short}{layout[key]}" for short, key, _ in TERMS[:-1] if short != "VPP" or layout[key] > 1)
    ranks = f"{layout['world_size']} ranks, {layout['data_parallel_size']} data-parallel"
    apart = f" of {layout['nodes']}" if layout["train_nodes"] < layout["nodes"] else ""
    return f"{sizes} on {layout['train_nodes']}{apart} nodes, {ranks}"


def _phases(plan: Mapping[str, Any]) -> Table:
    trainer = plan["trainer"]

    def row(phase: str, on_host: float) -> tuple[str, ...]:
        fullest = max((row for row in trainer["phases"] if row["phase"] == phase), key=lambda row: row["gpu_gib"])
        return phase, f"{fullest['gpu_gib']:.4g}", str(fullest["stage"]), _verdict(fullest), f"{on_host:.4g}"

    columns = (
        "phase",
        ">GiB of the fullest rank",
        ">its stage",
        f">of {trainer['capacity_gib']:g}",
        ">host GiB per node",
    )
    return _table(columns, itertools.starmap(row, trainer["host_memory_gib_per_node_by_phase"].items()))


def _verdict(row: Mapping[str, Any]) -> str:
    fitting = "fits" if row.get("has_headroom", True) else "fits, little room"
    return fitting if row["fits"] else "[bold red]does not fit[/]"


def _layouts(plan: Mapping[str, Any]) -> Table:
    layouts = plan["layouts"]

    def row(layout: Mapping[str, Any]) -> tuple[str, ...]:
        sizes = [layout["layers_per_stage"][-1] if name == "last" else layout[keys[name]] for name in names]
        return *map(str, sizes), f"{layout['peak_gib']:.4g}", _verdict(layout), layout["reasons"]

    keys, names = {short: key for short, key, _ in TERMS}, ("TP", "PP", "last", "CP", "EP", "ETP", "DP")
    title = f"{layouts['num_valid']} valid layouts, {layouts['num_fitting']} fit"
    columns = (*(f">{name}" for name in names), ">GiB", "", "why here")
    chosen = {**layouts["configured"], "reasons": f"chosen; {layouts['configured']['reasons']}"}
    others = [layout for layout in layouts["proposed"] if layout != layouts["configured"]]
    return _table(columns, map(row, [chosen, *others[: SHOWN_LAYOUTS - 1]]), title)


def _step(step: Mapping[str, Any]) -> Table:
    rows = (
        (
            row["phase"],
            *(format_seconds(row["once"]), format_seconds(row["per_step"]), format_percent(row["share"])),
            row["note"],
        )
        for row in (*step["phases"], *step["waiting"])
    )
    most = ", ".join(f"{row['cause']} {format_percent(row['share'], 0)}" for row in step["causes"][:3])
    reached = f"training reaches {format_percent(step['mfu'])} of the peak ({most})"
    idle = f"an average GPU waits for {format_percent(step['idle_share'])} of it"
    title = f"a step takes {format_seconds(step['seconds'])}; {idle}; {reached}"
    return _table(("phase", ">once", ">per step", ">share", ""), rows, title)


def _step_choice(candidates: Sequence[Mapping[str, Any]]) -> Table:
    def row(candidate: Mapping[str, Any]) -> tuple[str, ...]:
        names = ("context_parallel_size", "max_tokens_per_gpu", "virtual_pipeline_model_parallel_size")
        sizes = [f"{candidate[name]:,}" for name in names]
        where = "host" if candidate["optimizer_cpu_offload"] else "GPU"
        free = (where, *sizes, format_seconds(candidate["seconds"]), f"{candidate['peak_gib']:.4g}")
        verdict = "chosen" if candidate["is_chosen"] else _verdict(candidate)
        return candidate["recomputation"], *free, verdict

    columns = ("recomputed", "optimizer", ">CP", ">tokens", ">VPP", ">seconds", ">GiB", "")
    title = "log-probabilities and training: the plainest that fits, of those within 1 % of the fastest"
    return _table(columns, map(row, candidates), title)


def _speculation(speculation: Mapping[str, Any]) -> Table:
    rows = [
        (f"gain, {row['phase']}", f"{row['gain']:.2f}x", f"{row['requests']:,} of an engine, by the roofline alone")
        for row in speculation["phases"]
    ]
    without, drafting = speculation["without"], speculation["with"]
    limit = f"the rollout is counted at most {speculation['most_gain']:g} times as fast, as measured of RL steps"
    rows += [
        (name, f"{format_seconds(drafting[name])}", f"{format_seconds(without[name])} without; {limit}")
        for name in ("rollout", "step")
    ]
    is_on = "on" if speculation["is_on"] else "off, as it would be"
    title = (
        f"speculation (engine.mtp_steps={speculation['drafts']}) is {is_on}: {speculation['accepted']} tokens a step"
    )
    return _table(("", ">", ""), rows, title)


def _splits(splits: Sequence[Mapping[str, Any]]) -> Table:
    def row(split: Mapping[str, Any]) -> tuple[str, ...]:
        nodes = (str(split["own_nodes"] or "shared"), str(split["train_nodes"]))
        if split["why"]:
            return *nodes, *4 * ("",), split["why"]
        seconds = (split["rollout"], split["old_logprobs"] + split["train"], split["weight_sync"], split["seconds"])
        return *nodes, *map(format_seconds, seconds), split["engines"]

    columns = (">own nodes", ">train", ">rollout", ">training", ">weight sync", ">step", "engines, or why not")
    return _table(columns, map(row, splits), "a step by the nodes that only engines have (engine.own_nodes)")


def _asynchronous(forecast: Mapping[str, Any]) -> Table:
    """Return synchronous and asynchronous training, each with its best split of the nodes."""

    def row(mode: Mapping[str, Any]) -> tuple[str, ...]:
        engines = f"{mode['num_engines']}" + f" + {mode['num_prefill_engines']}" * (mode["num_prefill_engines"] > 0)
        idle = "" if mode["trainer_idle"] is None else format_percent(mode["trainer_idle"], 0)
        seconds = (format_seconds(mode[key]) for key in ("step_seconds", "bound_seconds", "pause_seconds"))
        shown = (idle, format_percent(mode["engines_idle"], 0), f"{mode['staleness']:.1f}")
        return mode["name"], str(mode["train_nodes"]), engines, *seconds, *shown

    columns = ("", ">train", ">engines", ">step", ">bound", ">pause", ">trainer idle", ">engines idle", ">age")
    title = f"does it pay to generate ahead (rollout.max_staleness)? {forecast['why']}"
    return _table(columns, map(row, forecast["modes"]), title)


def _failures(goodput: Mapping[str, Any]) -> Table:
    """Return effective training time: a column for each rate of failures."""
    rates = goodput["rates"]
    rows = (
        (
            f"{'missing: ' if key == 'missing' else ''}{same[0]['what']}",
            *(f"{format_percent(row['effective_share'])}, save every {row['save_interval']}" for row in same),
        )
        for key in ("features", "missing")
        for same in zip(*(rate[key] for rate in rates), strict=True)
    )
    title = f"share of wall time that ends in kept steps, goal {format_percent(goodput['goal'], 0)}"
    return _table(("failures", *(f">{rate['name']}" for rate in rates)), rows, title)


def _rules(plan: Mapping[str, Any]) -> Table:
    rows = (
        (
            rule["name"],
            *(str(rule[key]) for key in ("jobs", "nodes", "gpus")),
            format_bytes(rule["memory_bytes"]) if rule["memory_bytes"] else "",
            format_seconds(plan["durations_seconds"].get(rule["name"])),
            rule["does"],
        )
        for rule in plan["rules"]
    )
    return _table(("rule", ">jobs", ">nodes", ">GPUs", ">memory", ">time", "does"), rows)
