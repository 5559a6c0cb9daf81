"""The plan as a table on stdout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.readable import (
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
    console = Console(width=WIDTH)
    console.print(_numbers(plan))
    for table in (_phases(plan), _layouts(plan), _step(plan), _failures(plan), _rules(plan)):
        if table is not None:
            console.print()
            console.print(table)
    console.print(
        f"\n{len(plan['not_modelled'])} things are not modelled; plan.json and plan.html name them",
        highlight=False,
    )


def _numbers(plan: Mapping[str, Any]) -> Table:
    model, layout, engine, storage = plan["model"], plan["parallelism"], plan["engine"], plan["storage"]
    table = Table("", plan["run"], show_edge=False, header_style="bold")
    table.add_row("parameters", f"{model['num_parameters']:,} ({model['num_active_parameters']:,} active)")
    table.add_row("algorithm", plan["algorithm"])
    table.add_row("layout", _layout(layout))
    table.add_row("layers per stage", " ".join(map(str, layout["layers_per_stage"])))
    table.add_row(
        "trainer GiB per rank, by stage",
        "  ".join(f"{gib:.4g}" for gib in plan["trainer"]["memory_gib_by_stage"]),
    )
    _add_engines(table, engine)
    table.add_row(
        "shared storage",
        f"{format_bytes(storage['shared_bytes'])} ({format_number(storage['shared_bytes'])} bytes)",
    )
    table.add_row("each node's own disk", format_bytes(storage["node_local_bytes"]))
    if plan["gpu_hours"] is not None:
        cost = "" if plan["cost"] is None else f", {format_cost(plan['cost'], plan['currency'])}"
        table.add_row("GPU-hours", f"{format_number(plan['gpu_hours'])}{cost}")
    return table


def _add_engines(table: Table, engine: Mapping[str, Any]) -> None:
    """Add a block for each kind of engine."""
    kinds = [("engine", engine)]
    if engine["prefill"]:
        kinds = [("prefill engine", engine["prefill"]), ("decode engine", engine)]
        sizes = (f"{kind['num_engines']} x {kind['gpus_per_engine']} GPUs" for _, kind in kinds)
        table.add_row("engines", " prefill, ".join(sizes) + " decode")
    for name, kind in kinds:
        table.add_row(f"{name} GiB of weights per GPU", f"{kind['weights_gib_per_gpu']:.4g}")
        tokens = "not modelled" if kind["kv_tokens"] is None else f"at most {kind['kv_tokens']:,}"
        table.add_row(f"KV cache tokens per {name}", tokens)


def _layout(layout: Mapping[str, Any]) -> str:
    names = {
        "TP": "tensor_model",
        "PP": "pipeline_model",
        "CP": "context",
        "EP": "expert_model",
        "ETP": "expert_tensor",
    }
    sizes = " ".join(f"{short}{layout[f'{name}_parallel_size']}" for short, name in names.items())
    ranks = f"{layout['world_size']} ranks, {layout['data_parallel_size']} data-parallel"
    return f"{sizes} on {layout['nodes']} nodes, {ranks}"


def _phases(plan: Mapping[str, Any]) -> Table:
    trainer = plan["trainer"]
    table = Table(show_edge=False, header_style="bold")
    table.add_column("phase")
    for name in ("GiB of the fullest rank", "its stage", f"of {trainer['capacity_gib']:g}", "host GiB per node"):
        table.add_column(name, justify="right")
    for phase, on_host in trainer["host_memory_gib_per_node_by_phase"].items():
        fullest = max((row for row in trainer["phases"] if row["phase"] == phase), key=lambda row: row["gpu_gib"])
        verdict = "fits" if fullest["fits"] else "[bold red]does not fit[/]"
        table.add_row(phase, f"{fullest['gpu_gib']:.4g}", str(fullest["stage"]), verdict, f"{on_host:.4g}")
    return table


def _layouts(plan: Mapping[str, Any]) -> Table:
    layouts = plan["layouts"]
    title = f"{layouts['num_valid']} valid layouts, {layouts['num_fitting']} fit"
    table = Table(show_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
    for name in ("TP", "PP", "last", "CP", "EP", "ETP", "DP", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("why here")
    for row in layouts["proposed"][:SHOWN_LAYOUTS]:
        sizes = [row[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model")]
        sizes += [row["layers_per_stage"][-1], row["context_parallel_size"]]
        sizes += [row[f"{name}_parallel_size"] for name in ("expert_model", "expert_tensor")]
        sizes += [row["data_parallel_size"]]
        fitting = "fits" if row["has_headroom"] else "fits, little room"
        verdict = fitting if row["fits"] else "[bold red]does not fit[/]"
        table.add_row(*map(str, sizes), f"{row['peak_gib']:.4g}", verdict, row["reasons"])
    return table


def _step(plan: Mapping[str, Any]) -> Table | None:
    step = plan["step"]
    if step is None:
        return None
    title = f"a step takes {format_seconds(step['seconds'])}"
    table = Table(show_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
    table.add_column("phase", no_wrap=True)
    for name in ("once", "per step", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in (*step["phases"], *step["waiting"]):
        numbers = (format_seconds(row["once"]), format_seconds(row["per_step"]), format_percent(row["share"]))
        table.add_row(row["phase"], *numbers, row["note"])
    return table


def _failures(plan: Mapping[str, Any]) -> Table | None:
    """Return effective training time: a column for each rate of failures."""
    goodput = plan["goodput"]
    if goodput is None:
        return None
    title = f"share of wall time that ends in kept steps, goal {format_percent(goodput['goal'], 0)}"
    table = Table(show_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
    table.add_column("failures")
    for rate in goodput["rates"]:
        table.add_column(rate["name"], justify="right")
    for key in ("features", "missing"):
        for rows in zip(*(rate[key] for rate in goodput["rates"]), strict=True):
            cells = [f"{format_percent(row['effective_share'])}, save every {row['save_interval']}" for row in rows]
            table.add_row(f"{'missing: ' if key == 'missing' else ''}{rows[0]['what']}", *cells)
    return table


def _rules(plan: Mapping[str, Any]) -> Table:
    table = Table(show_edge=False, header_style="bold")
    table.add_column("rule")
    for name in ("jobs", "nodes", "GPUs", "time"):
        table.add_column(name, justify="right")
    table.add_column("does")
    for rule in plan["rules"]:
        seconds = plan["durations_seconds"].get(rule["name"])
        numbers = [str(rule[key]) for key in ("jobs", "nodes", "gpus")]
        table.add_row(rule["name"], *numbers, format_seconds(seconds), rule["does"])
    return table
