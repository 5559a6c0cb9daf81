"""The plan of a configuration: layout, memory, disk, durations, every rule and value, before any work starts.

`build_plan` returns the content of `plan.json`, whose keys are stable. "not_modelled" lists the parts that the plan
does not cover, in the JSON and on the page.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.config.derived import (
    calibration_passes,
    data_parallel_size,
    layers_per_stage,
    trainer_nodes,
    uses_engines,
    world_size,
)
from posttrain.config.load import Resolved
from posttrain.config.presets import ratios_in_words
from posttrain.config.rules import check_trainable
from posttrain.config.schema import Config
from posttrain.config.site_rules import check_launcher
from posttrain.plan.flags.rendered import rendered_flags
from posttrain.plan.forecast import plan_goodput
from posttrain.plan.forecast.plan_nodes import nodes_part, splits_part
from posttrain.plan.forecast.plan_speculation import speculation_part
from posttrain.plan.forecast.plan_time import step_part, why_no_split, why_no_step
from posttrain.plan.job_needs import RuleNeeds, check_served
from posttrain.plan.problems import find_problems, find_warnings
from posttrain.plan.sizing import engine, memory, storage
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.calibration import calibration_gib, conversations
from posttrain.plan.sizing.evaluation import evaluation_nodes, serving_config
from posttrain.plan.sizing.layout import LayoutProposal, assess_layout, propose_layouts
from posttrain.plan.sizing.memory_phases import PhaseMemory, capacity_gib, host_gib_by_phase, phase_memory
from posttrain.plan.sizing.model_size import (
    count_active_parameters,
    count_parameters,
    model_weights,
    mtp_weights,
    parameters_by_component,
    vision_weights,
)
from posttrain.plan.sizing.node_copy import node_copies
from posttrain.plan.sizing.untracked_memory import uncertainty_gib, untracked_terms
from posttrain.plan.step_choice import step_choice_part
from posttrain.plan.timing import duration
from posttrain.plan.timing.async_forecast import forecast_part
from posttrain.plan.timing.decoding import DecodingGpus
from posttrain.plan.timing.serving_load import SHOWN_CONCURRENCIES, is_predicted, predict_serving
from posttrain.plan.timing.step_time import split_part
from posttrain.report.cost import cost_part
from posttrain.report.report_data import flat_config
from posttrain.store import Paths

# Number of the best layouts to show; the others are slower or do not fit.
SHOWN_LAYOUTS = 12
NOT_MODELLED = (
    *memory.NOT_MODELLED,
    *engine.NOT_MODELLED,
    *storage.NOT_MODELLED,
    *duration.NOT_MODELLED,
    *plan_goodput.NOT_MODELLED,
)


def build_plan(resolved: Resolved, jobs_at_once: int | None = None) -> dict[str, Any]:
    """Return the content of `plan.json` for a resolved configuration.

    Args:
        resolved: The configuration.
        jobs_at_once: Number of jobs that run concurrently; None if unknown, which counts as all.
    """
    config, paths = resolved.config, Paths(resolved)
    needs = RuleNeeds(config, jobs_at_once=jobs_at_once, is_fork=bool(resolved.fork))
    needed = needs.storage
    served, phases = engine.engine_memory(config), phase_memory(config)
    layouts, split = propose_layouts(config), split_part(config)
    return {
        "run": resolved.run,
        "algorithm": resolved.algorithm,
        "ratios": ratios_in_words(config),
        "model": _model_part(config),
        "parallelism": _parallelism_part(config),
        "layouts": _layouts_part(config, layouts, served),
        "trainer": _trainer_part(config, phases),
        "engine": _engine_part(config, served),
        "evaluation": _evaluation_part(config),
        "calibration": _calibration_part(config, needs),
        "nodes": nodes_part(config),
        "storage": {
            "shared_bytes": needed.shared_bytes,
            "node_local_bytes": needed.node_local_bytes,
            "store_bytes": needed.store_bytes,
            "run_bytes": needed.run_bytes,
            **dataclasses.asdict(needed),
            "node_copies": _node_copies_part(config, needs.rates),
        },
        "durations_seconds": needs.seconds,
        "jobs_at_once": jobs_at_once,
        "step": step_part(config, needs.seconds),
        "step_choice": step_choice_part(config, resolved.origins),
        "why_no_step": why_no_step(config),
        "speculation": speculation_part(config, needs.rates.shared_storage),
        "goodput": plan_goodput.goodput_part(config, needed, needs.rates, needs.seconds),
        "assumptions": dataclasses.asdict(ASSUMPTIONS),
        "best_split": split,
        "why_no_split": why_no_split(config, split),
        "asynchronous": forecast_part(config, needs.rates.shared_storage),
        "splits": splits_part(config, needs.rates.shared_storage),
        "bandwidths_assumed_bytes_per_second": dataclasses.asdict(needs.rates),
        "rules": needs.plan_part(
            resolved.request, {f"evaluate {when}": paths.evaluation(when) for when in ("before", "after")}
        ),
        **cost_part(
            config, [(rule.rule, needs.seconds[rule.name]) for rule in needs.chain if rule.name in needs.seconds]
        ),
        "flags": {
            key: {"value": value, "origin": resolved.origins.get(key, "schema default")}
            for key, value in flat_config(config).items()
        }
        | rendered_flags(config, resolved.origins),
        "problems": [problem.as_dict() for problem in find_problems(config)],
        **_doubts_part(config),
        "not_modelled": list(NOT_MODELLED),
    }


def _doubts_part(config: Config) -> dict[str, Any]:
    """Return the doubts about a run; a plan for several nodes needs no site, although its run does."""
    no_site = list(check_launcher(config))
    warnings = [one for one in find_warnings(config) if not (no_site and one.key.startswith("site."))]
    not_trainable = [one for one in (*check_trainable(config), *check_served(config)) if one not in no_site]
    return {
        "nodes_without_site": config.nodes if no_site else 0,
        "warnings": [problem.as_dict() for problem in warnings],
        "not_trainable": [problem.as_dict() for problem in not_trainable],
    }


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
    weights, vision = model_weights(arch), vision_weights(arch)
    return {
        "name": config.model.name,
        "model_type": arch.model_type,
        "num_parameters": count_parameters(weights),
        "num_active_parameters": count_active_parameters(arch),
        "num_mtp_parameters": count_parameters(mtp_weights(arch)),
        **({"num_vision_parameters": count_parameters(vision)} if vision else {}),
        "parameters_by_component": parameters_by_component(weights),
    }


def _engine_part(config: Config, served: engine.EngineMemory) -> dict[str, Any]:
    part = dataclasses.asdict(served)
    for of_role in filter(None, (part, part["prefill"])):
        if of_role["max_requests"] is None:
            del of_role["max_requests"]
    if part["prefill"]:
        del part["prefill"]["prefill"]
        pd = config.engine.pd
        part["prefill"] |= {"num_engines": pd.num_prefill_engines, "gpus_per_engine": pd.gpus_per_prefill_engine}
    num_engines = config.engine.num_engines if uses_engines(config) else 0
    counted = {"num_engines": num_engines, "gpus_per_engine": config.engine.gpus_per_engine}
    bound = None if served.kv_tokens is None else engine.POOL_BOUND
    return part | counted | {"kind": config.engine.kind, "pool_bound": bound}


def _evaluation_part(config: Config) -> dict[str, Any] | None:
    """Return the engines of evaluations before and after training; None for external engines, and on CPUs."""
    if config.hardware.device == "cpu" or config.evaluation.addresses or not evaluation_nodes(config):
        return None
    served = serving_config(config)
    memory_of = engine.engine_memory(served)
    return {
        "nodes": served.nodes,
        "num_engines": served.engine.num_engines,
        "gpus_per_engine": served.engine.gpus_per_engine,
        "precision": "fp8" if served.rollout.fp8 else "source",
        "attention": memory_of.attention,
        "weights_gib_per_gpu": round(memory_of.weights_gib_per_gpu, 4),
        "limit_gib_per_gpu": round(served.engine.mem_fraction_static * config.hardware.memory_gib_per_gpu, 4),
        "kv_tokens": memory_of.kv_tokens,
        "speed": _speed(served, memory_of),
    }


def _calibration_part(config: Config, needs: RuleNeeds) -> dict[str, Any] | None:
    """Return the resources of an NVFP4 calibration, if requested; None for a dense model, or without passes."""
    if not config.model.architecture.n_routed_experts or not calibration_passes(config):
        return None
    job = needs.of("calibrate")
    gib, reads = round(calibration_gib(config), 4), conversations(config)
    return {"nodes": job.nodes, "gpus": job.gpus, "seconds": job.seconds, "gib_per_rank": gib, "conversations": reads}


def _speed(config: Config, held: engine.EngineMemory) -> list[dict[str, Any]]:
    """Return one engine's rows by number of clients; empty without a prediction."""
    arch, tokens = config.model.architecture, held.kv_tokens or 0
    if not is_predicted(arch, config.hardware, tokens):
        return []
    stored, apart = "fp8" if config.rollout.fp8 else "bf16", held.attention == "data_parallel"
    gpus = DecodingGpus(arch, config.hardware, config.engine.gpus_per_engine, stored, dp_attention=apart)
    return [dataclasses.asdict(row) for row in predict_serving(gpus, tokens, SHOWN_CONCURRENCIES)]


def _trainer_part(config: Config, phases: list[PhaseMemory]) -> dict[str, Any]:
    stages, capacity = memory.stage_memory(config), capacity_gib(config)
    on_host, uncertainty = host_gib_by_phase(config, phases), uncertainty_gib(config)
    return {
        "memory_gib_by_stage": [round(stage.total_gib, 4) for stage in stages],
        "stages": [stage.as_dict() for stage in stages],
        "capacity_gib": capacity,
        "unseen": [dataclasses.asdict(term) for term in untracked_terms(config)],
        "uncertainty_gib": round(uncertainty, 4),
        "phases": [
            {
                "phase": item.phase,
                "stage": item.stage,
                "gpu_gib": round(item.gpu_gib, 4),
                "fits": item.gpu_gib <= capacity,
                "surely_fits": item.gpu_gib + uncertainty <= capacity,
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
        "train_nodes": trainer_nodes(config),
        "layers_per_stage": layers_per_stage(config),
    }
