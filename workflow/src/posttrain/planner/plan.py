"""The plan of a configuration: layout, memory, disk, durations, every rule and value, before any work starts.

`build_plan` gives the content of `plan.json`; its keys do not change. This is its first form: what it does
not model is listed under "not_modelled", in the JSON and on the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.config.derived import data_parallel_size, layers_per_stage, world_size
from posttrain.config.load import Resolved
from posttrain.config.rules import check_trainable
from posttrain.config.schema import EXPERIMENT_SECTIONS, Config
from posttrain.errors import Problem
from posttrain.observability.report import config_rows
from posttrain.observability.report_dag import RuleState, draw_chain
from posttrain.observability.report_data import flat_config
from posttrain.observability.report_page import render_page
from posttrain.observability.rule_chain import rule_chain
from posttrain.planner import duration, engine, memory, storage
from posttrain.planner.capacity import check_capacity
from posttrain.planner.flags import rendered_flags
from posttrain.planner.guesses import GUESSES
from posttrain.planner.layout import LayoutProposal, assess_layout, propose_layouts
from posttrain.planner.layout_choice import requests_that_fit
from posttrain.planner.memory_phases import PhaseMemory, capacity_gib, host_gib_by_phase, phase_memory
from posttrain.planner.model_size import (
    count_active_parameters,
    count_parameters,
    model_weights,
    mtp_weights,
    parameters_by_component,
)
from posttrain.planner.node_copy import node_copies
from posttrain.planner.plan_figures import GROUPS, flag_groups, stage_bars
from posttrain.planner.plan_rules import RuleNeeds
from posttrain.planner.plan_time import step_part, why_no_split
from posttrain.planner.published import accuracy_part
from posttrain.planner.step_time import split_part

SHOWN_LAYOUTS = 12
NOT_MODELLED = (
    *memory.NOT_MODELLED,
    *engine.NOT_MODELLED,
    *storage.NOT_MODELLED,
    *duration.NOT_MODELLED,
)


def build_plan(resolved: Resolved, workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `plan.json` for a configuration that resolved.

    Args:
        resolved: The configuration.
        workflow: What it was resolved from; stands in the commands.
    """
    config, needs = resolved.config, RuleNeeds(resolved.config)
    needed = needs.storage
    served, phases = engine.engine_memory(config), phase_memory(config)
    layouts = propose_layouts(config)
    return {
        "run": resolved.run,
        "model": _model_part(config),
        "parallelism": _parallelism_part(config),
        "layouts": _layouts_part(config, layouts, served),
        "trainer": _trainer_part(config, phases),
        "engine": {
            **dataclasses.asdict(served),
            "num_engines": config.engine.num_engines,
            "kind": config.engine.kind,
        },
        "storage": {
            "shared_bytes": needed.shared_bytes,
            "node_local_bytes": needed.node_local_bytes,
            "store_bytes": needed.store_bytes,
            "run_bytes": needed.run_bytes,
            **dataclasses.asdict(needed),
            "node_copies": _node_copies_part(config, needs.rates),
        },
        "durations_seconds": needs.seconds,
        "step": step_part(config, needs.seconds),
        "guesses": dataclasses.asdict(GUESSES),
        "step_time_accuracy": accuracy_part(config),
        "best_split": split_part(config),
        "why_no_split": why_no_split(config),
        "bandwidths_assumed_bytes_per_second": dataclasses.asdict(needs.rates),
        "rules": needs.plan_part(workflow),
        "flags": {
            key: {"value": value, "origin": resolved.origins.get(key, "schema default")}
            for key, value in flat_config(config).items()
        }
        | rendered_flags(config, resolved.origins),
        "problems": [problem.as_dict() for problem in find_problems(config, phases, layouts, served, needed)],
        "not_trainable": [problem.as_dict() for problem in (*check_trainable(config), *_check_save(config, phases))],
        "not_modelled": list(NOT_MODELLED),
    }


def plan_of_problems(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the content of `plan.json` for a configuration that did not resolve: the problems only."""
    parts = ("run", "model", "parallelism", "layouts", "trainer", "engine", "storage", "durations_seconds", "rules")
    empty = dict.fromkeys((*parts, "flags"))
    return {
        **empty,
        "problems": [problem.as_dict() for problem in problems],
        "not_trainable": [],
        "not_modelled": list(NOT_MODELLED),
    }


def find_problems(
    config: Config,
    phases: Sequence[PhaseMemory],
    layouts: Sequence[LayoutProposal],
    served: engine.EngineMemory,
    needed: storage.Storage,
) -> list[Problem]:
    """Return what the plan's numbers rule out on this hardware and at this site.

    Args:
        config: The resolved configuration.
        phases: `phase_memory` of it.
        layouts: `propose_layouts` of it.
        served: `engine_memory` of it.
        needed: `storage` of it.
    """
    host_memory_gib = max(host_gib_by_phase(config, list(phases)).values())
    alone = [*_check_trainer(config, phases, layouts), *_check_engine(config, served)]
    # What is too large by itself needs no second problem for the phases in which it meets the other.
    return [
        *alone,
        *(() if alone else _check_shared(config, phases)),
        *_check_engine_count(config),
        *check_capacity(config, needed, host_memory_gib),
    ]


def render_plan(plan: Mapping[str, Any], resolved: Resolved | None) -> str:
    """Return the plan as one self-contained HTML page.

    Args:
        plan: Content of `plan.json`.
        resolved: The configuration; None when it did not resolve, the page then shows the problems only.
    """
    if resolved is None:
        return render_page("plan.html.j2", plan=plan, config=None)
    rules = rule_chain(resolved.config)
    planned = {rule.name: RuleState("planned", plan["durations_seconds"].get(rule.name)) for rule in rules}
    return render_page(
        "plan.html.j2",
        plan=plan,
        config=resolved.config,
        chain=draw_chain(rules, planned),
        stage_bars=stage_bars(plan["trainer"]),
        memory_groups=GROUPS,
        proposed_layouts=[(str(place), row) for place, row in enumerate(plan["layouts"]["proposed"], start=1)],
        flag_groups=flag_groups(plan["flags"]),
        config_sections=config_rows(resolved.config, resolved.origins),
        experiment_sections=EXPERIMENT_SECTIONS,
    )


def _check_trainer(
    config: Config, phases: Sequence[PhaseMemory], layouts: Sequence[LayoutProposal]
) -> Iterator[Problem]:
    fullest = _fullest(phases, ("train", "old_logprobs", "mismatch"))
    if fullest.gpu_gib <= capacity_gib(config):
        return
    fitting = [layout for layout in layouts if layout.fits]
    if fitting:
        sizes = " ".join(f"parallel.{name}={size}" for name, size in fitting[0].sizes.items())
        remedy = f"set='{sizes}', or trainer.optimizer_cpu_offload=true"
    else:
        remedy = requests_that_fit(config, {})
    yield Problem("parallel", _amount(fullest), _limit(config), remedy)


def _check_shared(config: Config, phases: Sequence[PhaseMemory]) -> Iterator[Problem]:
    """Yield what does not fit while engines are awake."""
    fullest, fraction = _fullest(phases, ("rollout", "weight_sync")), config.engine.mem_fraction_static
    excess = fullest.gpu_gib - capacity_gib(config)
    if excess > 0 and config.hardware.device == "cuda":
        lower = fraction - excess / config.hardware.memory_gib_per_gpu
        remedy = f"{max(0.0, lower - 0.005):.2f} or less"
        yield Problem("engine.mem_fraction_static", f"{fraction}: {_amount(fullest)}", _limit(config), remedy)


def _check_save(config: Config, phases: Sequence[PhaseMemory]) -> Iterator[Problem]:
    """Yield that a save does not fit: its gathering depends on the checkpoint's exchange, not on the layout alone."""
    fullest = _fullest(phases, ("save",))
    if fullest.gpu_gib > capacity_gib(config):
        allowed = f"{_limit(config)} to save with this version, which gathers optimizer state on the GPU"
        yield Problem("trainer.save_interval", _amount(fullest), allowed, "plan it, or take more nodes")


def _fullest(phases: Sequence[PhaseMemory], names: Sequence[str]) -> PhaseMemory:
    return max((item for item in phases if item.phase in names), key=lambda item: item.gpu_gib)


def _amount(found: PhaseMemory) -> str:
    return f"{found.gpu_gib:.1f} GiB per rank of stage {found.stage} in {found.phase}"


def _limit(config: Config) -> str:
    return f"at most {capacity_gib(config):g} GiB per rank ({config.hardware.name})"


def _check_engine(config: Config, served: engine.EngineMemory) -> list[Problem]:
    fraction, memory_gib = config.engine.mem_fraction_static, config.hardware.memory_gib_per_gpu
    if served.weights_gib_per_gpu <= fraction * memory_gib:
        return []
    found = f"{served.weights_gib_per_gpu:.1f} GiB of weights per GPU"
    allowed = f"less than {fraction * memory_gib:.1f} GiB (engine.mem_fraction_static of {memory_gib:g} GiB)"
    remedy = "more GPUs per engine, or rollout.fp8=true"
    return [Problem("engine.gpus_per_engine", found, allowed, remedy)]


def _check_engine_count(config: Config) -> list[Problem]:
    count, existing = config.engine.num_engines, world_size(config)
    wanted = count * config.engine.gpus_per_engine
    if config.hardware.device == "cpu" or wanted <= existing:
        return []
    found, allowed = f"{wanted} GPUs in {count} engines", f"at most {existing} GPUs ({config.nodes} nodes)"
    return [Problem("engine.num_engines", found, allowed, "fewer engines or fewer GPUs per engine")]


def _node_copies_part(config: Config, rates: duration.Bandwidths) -> list[dict[str, Any]]:
    return [
        {
            **dataclasses.asdict(copy),
            "seconds": round(duration.stage_seconds(copy, rates), 1),
            "is_chosen": copy.choice == config.stage.copy,
        }
        for copy in node_copies(config)
    ]


def _model_part(config: Config) -> dict[str, Any]:
    arch = config.model.architecture
    weights = model_weights(arch)
    return {
        "name": config.model.name,
        "model_type": arch.model_type,
        "num_parameters": count_parameters(weights),
        "num_active_parameters": count_active_parameters(arch),
        "num_mtp_parameters": count_parameters(mtp_weights(arch)),
        "parameters_by_component": parameters_by_component(weights),
    }


def _trainer_part(config: Config, phases: list[PhaseMemory]) -> dict[str, Any]:
    stages, capacity = memory.stage_memory(config), capacity_gib(config)
    on_host = host_gib_by_phase(config, phases)
    return {
        "memory_gib_by_stage": [round(stage.total_gib, 4) for stage in stages],
        "stages": [stage.as_dict() for stage in stages],
        "capacity_gib": capacity,
        "phases": [
            {
                "phase": item.phase,
                "stage": item.stage,
                "gpu_gib": round(item.gpu_gib, 4),
                "fits": item.gpu_gib <= capacity,
                "gpu": {part: round(gib, 4) for part, gib in item.gpu.items()},
                "host_gib": round(item.host_gib, 4),
                "host": {part: round(gib, 4) for part, gib in item.host.items()},
            }
            for item in phases
        ],
        "host_memory_gib_per_node": round(max(on_host.values()), 4),
        "host_memory_gib_per_node_by_phase": {phase: round(gib, 4) for phase, gib in on_host.items()},
    }


def _layouts_part(config: Config, layouts: list[LayoutProposal], served: engine.EngineMemory) -> dict[str, Any]:
    return {
        "configured": assess_layout(config, served).as_dict(),
        "num_valid": len(layouts),
        "num_fitting": sum(layout.fits for layout in layouts),
        "proposed": [layout.as_dict() for layout in layouts[:SHOWN_LAYOUTS]],
    }


def _parallelism_part(config: Config) -> dict[str, Any]:
    return {
        **dataclasses.asdict(config.parallel),
        "data_parallel_size": data_parallel_size(config),
        "world_size": world_size(config),
        "nodes": config.nodes,
        "layers_per_stage": layers_per_stage(config),
    }
