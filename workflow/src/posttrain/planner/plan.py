"""The plan of a configuration: layout, memory, disk, durations, every rule and value, before any work starts.

`build_plan` gives the content of `plan.json`; its keys do not change. This is its first form: what it does
not model is listed under "not_modelled", in the JSON and on the page.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
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
from posttrain.observability.rule_chain import RuleNode, rule_chain
from posttrain.planner import duration, engine, memory, storage
from posttrain.planner.flags import rendered_flags
from posttrain.planner.model_size import (
    count_active_parameters,
    count_parameters,
    model_weights,
    mtp_weights,
    parameters_by_component,
)
from posttrain.planner.published import accuracy_part
from posttrain.planner.step_time import split_part

NOT_MODELLED = (
    "layouts for node counts without a file in config/nodes: the configured layout is planned as it is",
    "memory by phase when trainer and engines share GPUs: each is planned as if it had the GPU to itself",
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
    config, rates = resolved.config, duration.Bandwidths()
    needed = storage.storage(config)
    stages, served = memory.stage_memory(config), engine.engine_memory(config)
    seconds = duration.durations_seconds(config, needed, rates)
    return {
        "run": resolved.run,
        "model": _model_part(config),
        "parallelism": _parallelism_part(config),
        "trainer": {
            "memory_gib_by_stage": [round(stage.total_gib, 4) for stage in stages],
            "stages": [stage.as_dict() for stage in stages],
            "host_memory_gib_per_node": round(memory.host_memory_gib_per_node(config), 4),
        },
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
        },
        "durations_seconds": seconds,
        "step_time_accuracy": accuracy_part(config),
        "best_split": split_part(config),
        "bandwidths_assumed_bytes_per_second": dataclasses.asdict(rates),
        "rules": [_rule_part(rule, workflow) for rule in rule_chain(config)],
        "flags": {
            key: {"value": value, "origin": resolved.origins.get(key, "schema default")}
            for key, value in flat_config(config).items()
        }
        | rendered_flags(config, resolved.origins),
        "problems": [problem.as_dict() for problem in find_problems(config, stages, served)],
        "not_trainable": [problem.as_dict() for problem in check_trainable(config)],
        "not_modelled": list(NOT_MODELLED),
    }


def plan_of_problems(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the content of `plan.json` for a configuration that did not resolve: the problems only."""
    empty = dict.fromkeys(
        ("run", "model", "parallelism", "trainer", "engine", "storage", "durations_seconds", "rules", "flags")
    )
    return {
        **empty,
        "problems": [problem.as_dict() for problem in problems],
        "not_trainable": [],
        "not_modelled": list(NOT_MODELLED),
    }


def find_problems(config: Config, stages: Sequence[memory.StageMemory], served: engine.EngineMemory) -> list[Problem]:
    """Return what the plan's numbers rule out on this hardware."""
    return [*_check_trainer(config, stages), *_check_engine(config, served), *_check_engine_count(config)]


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
        config_sections=config_rows(resolved.config, resolved.origins),
        experiment_sections=EXPERIMENT_SECTIONS,
    )


def _check_trainer(config: Config, stages: Sequence[memory.StageMemory]) -> list[Problem]:
    available, hardware = config.hardware.memory_gib_per_gpu, config.hardware
    if hardware.device == "cpu":
        # A CPU's memory is stated per node, and the ranks of a node share it.
        available /= hardware.gpus_per_node
    fullest = max(stages, key=lambda stage: stage.total_gib)
    if fullest.total_gib <= available:
        return []
    found = f"{fullest.total_gib:.1f} GiB of weights, gradients and optimizer state in stage {fullest.stage}"
    remedy = "more nodes, larger expert or pipeline parallelism, or trainer.optimizer_cpu_offload=true"
    return [Problem("parallel", found, f"less than {available:g} GiB per rank ({hardware.name})", remedy)]


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


def _parallelism_part(config: Config) -> dict[str, Any]:
    return {
        **dataclasses.asdict(config.parallel),
        "data_parallel_size": data_parallel_size(config),
        "world_size": world_size(config),
        "nodes": config.nodes,
        "layers_per_stage": layers_per_stage(config),
    }


def _rule_part(rule: RuleNode, workflow: Mapping[str, Any]) -> dict[str, Any]:
    settings = [f"{key}={value}" for key, value in workflow.items() if value not in (None, "")]
    command = ["snakemake", "--cores", "all", "--until", rule.rule, "--config", *settings]
    return {
        "name": rule.name,
        "does": rule.does,
        "after": list(rule.after),
        "jobs": rule.num_jobs,
        "nodes": rule.nodes,
        "gpus": rule.gpus,
        "command": shlex.join(command),
    }
