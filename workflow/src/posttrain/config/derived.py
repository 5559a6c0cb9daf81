"""Derived values. Pure arithmetic, no torch, no files."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from posttrain.config.calibration import CalibrationPass
from posttrain.config.families import shared_experts_width
from posttrain.config.schema import RECOMPUTED_MODULES, Config

# Bytes that a rank sends per round from shard to shard. Two rounds at a time pass through host memory on every rank.
SHARDED_ROUND_BYTES = 256 << 20


def trainer_nodes(config: Config) -> int:
    """Return the number of nodes with trainer ranks: the job's first nodes, all except the engines' own."""
    return max(config.nodes - config.engine.own_nodes, 1)  # a rule rejects engines that leave no node


def engine_nodes(config: Config) -> range:
    """Return the indices of the nodes that engines may use: their own nodes if they have some, else all."""
    return range(trainer_nodes(config) if config.engine.own_nodes else 0, config.nodes)


def world_size(config: Config) -> int:
    """Return the number of trainer ranks."""
    return trainer_nodes(config) * config.hardware.gpus_per_node


def room_for_engines(config: Config) -> int:
    """Return the number of GPUs that engines may use; see `engine_nodes`."""
    return len(engine_nodes(config)) * config.hardware.gpus_per_node


def nodes_with_spares(config: Config) -> int:
    """Return the nodes of the training job; a run on one node has no spares, because losing that node ends the job."""
    return config.nodes + (config.site.slurm.spare_nodes if config.nodes > 1 else 0)


def model_parallel_size(config: Config) -> int:
    """Return the number of ranks per copy of the dense weights: TP x PP x CP."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(config: Config) -> int:
    """Return the number of ranks that see different samples."""
    return world_size(config) // model_parallel_size(config)


def recomputable_modules(config: Config) -> tuple[str, ...]:
    """Return the modules that a layer of the model has, and that its trainer can compute again one by one.

    Grouped activations are Transformer Engine's alone. A norm of ours is several operations, whose gradients FP32 would
    add up in another order; in BF16 it begins with a cast. With the engine's routes a router is told them once a pass,
    so an MoE layer is computed again only with the whole layer (`rl.megatron_backend.routing_replay`).
    """
    arch, has_experts = config.model.architecture, config.model.architecture.n_routed_experts > 0
    has = {
        "layernorm": config.hardware.device == "cuda" or config.trainer.params_dtype == "bf16",
        "mla_up_proj": arch.kv_lora_rank > 0,
        "moe_act": has_experts and config.hardware.device == "cuda",
        "mlp": not has_experts or arch.first_k_dense_replace > 0,
        "shared_experts": has_experts and shared_experts_width(arch) > 0,
        "moe": has_experts and not config.algorithm.routing_replay,
    }
    return tuple(module for module in RECOMPUTED_MODULES if has[module])


def needs_untrained(config: Config) -> bool:
    """Return whether engines need weights that the trainer does not send: a vision tower, MTP layers for drafts."""
    return config.engine.mtp_steps > 0 or config.model.architecture.vision.depth > 0


def recomputed_share(config: Config) -> float:
    """Return the share of the largest stage's layers that are computed again in full."""
    trainer, chunks = config.trainer, config.parallel.virtual_pipeline_model_parallel_size
    if trainer.recompute_granularity != "full":
        return 0.0
    if trainer.recompute_method == "uniform":
        return 1.0
    return min(trainer.recompute_num_layers * chunks / max(layers_per_stage(config)), 1.0)


def uses_engines(config: Config) -> bool:
    """Return whether the training job has engines; SFT needs none."""
    return config.training.objective == "rl"


def takes_turns(config: Config) -> bool:
    """Return whether trainer and engines take turns on shared GPUs, each sleeping in host memory meanwhile."""
    asked = config.engine.sleep == "always" or (config.engine.sleep == "auto" and config.hardware.device == "cuda")
    return asked and uses_engines(config) and not config.engine.own_nodes


def is_off_policy(config: Config) -> bool:
    """Return whether a step may train on tokens of older weights."""
    return uses_engines(config) and config.rollout.max_staleness > 0


def runs_ahead(config: Config) -> bool:
    """Return whether engines generate while the trainer trains."""
    return is_off_policy(config) and not takes_turns(config)


def uses_queue(config: Config) -> bool:
    """Return whether a queue of groups lies between engines and trainer: groups are requested one by one."""
    one_by_one = config.rollout.dynamic_sampling or bool(config.data.environment)
    return is_off_policy(config) or (uses_engines(config) and one_by_one)


def engines_load(config: Config) -> bool:
    """Return whether engines load weights at the start of a run.

    Engines that sleep while the trainer loads, and engines updated shard by shard, get their weights from the trainer.
    """
    return uses_engines(config) and not takes_turns(config) and weight_transport(config) != "sharded"


def rollout_samples_per_step(config: Config) -> int:
    """Return the number of samples per rollout."""
    return config.rollout.rollout_batch_size * config.rollout.num_samples_per_prompt


def token_budget(config: Config) -> int:
    """Return the tokens of a micro-batch, whose row the context-parallel ranks share."""
    return config.trainer.max_tokens_per_gpu * config.parallel.context_parallel_size


def num_updates_per_step(config: Config) -> int:
    """Return the number of optimizer steps per rollout."""
    return rollout_samples_per_step(config) // config.training.global_batch_size


def warmup_steps(config: Config) -> int:
    """Return the number of linear warm-up steps."""
    return config.optimizer.lr_warmup_steps or math.ceil(
        share_of(config.optimizer.lr_warmup_share, config.training.num_steps)
    )


def min_lr(config: Config) -> float:
    """Return the final learning rate of the schedule."""
    optimizer = config.optimizer
    return optimizer.lr if optimizer.lr_schedule == "constant" else optimizer.lr * optimizer.lr_floor


def lr_decay_steps(config: Config) -> int:
    """Return the number of final steps over which the learning rate decays (wsd)."""
    return math.ceil(share_of(config.optimizer.lr_decay_share, config.training.num_steps))


def share_of(share: float, count: int) -> Fraction:
    """Return a share of a count, computed exactly from the decimal number in the configuration.

    Example:
        0.07 of 100 is 7; the floating-point product, 7.000000000000001, would be rounded up to 8.
    """
    return Fraction(repr(share)) * count


def prefill_gpus(config: Config) -> int:
    """Return the number of GPUs of the prefill-only engines."""
    return config.engine.pd.num_prefill_engines * config.engine.pd.gpus_per_prefill_engine


def proves_weights(config: Config) -> bool:
    """Return whether engines keep their weights exactly as loaded, and can prove it.

    On GPUs other than Hopper, SGLang rearranges or requantises weights after loading for some kernels.
    """
    is_hopper = config.hardware.compute_capability.startswith("9.")
    return config.engine.kind == "embedded" or config.hardware.device == "cpu" or is_hopper


def weight_transport(config: Config) -> str:
    """Return how new weights reach the engines: "sharded", "tensor" or "disk"."""
    best = "sharded" if config.engine.kind == "sglang" else "tensor"
    return best if config.engine.weight_transport == "auto" else config.engine.weight_transport


def update_bytes_at_once(config: Config) -> int:
    """Return the bytes of a weight update that a rank sends at a time: a bucket, or a round from shard to shard."""
    bucket = config.engine.weight_bucket_mib << 20
    return min(bucket, SHARDED_ROUND_BYTES) if weight_transport(config) == "sharded" else bucket


def engine_gpus(config: Config) -> int:
    """Return the number of GPUs of all engines, prefill-only ones included."""
    return prefill_gpus(config) + config.engine.num_engines * config.engine.gpus_per_engine


def mismatch_limits(config: Config) -> tuple[float, float]:
    """Return the largest mean |trainer - engine| expected: with the trainer's own weights, and with those served.

    The trainer's own weights are rounded for the engine, at least to the Hub's BF16. With the served weights, only the
    precision of the computation differs: SGLang's FP8 kernels also round activations, and the embedded engine computes
    with dequantised weights.
    """
    limits = config.trainer.mismatch
    own = limits.quantised if config.rollout.fp8 else limits.bf16
    if config.rollout.fp8 and config.engine.kind == "sglang":
        return own, limits.quantised
    is_fp32 = config.trainer.params_dtype == "fp32" and config.engine.dtype == "float32"
    return own, limits.fp32 if is_fp32 else limits.bf16


def layers_per_stage(config: Config) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, first to last.

    Example:
        78 layers on 4 stages with 18 in the last give [20, 20, 20, 18].
    """
    parallel, layers = config.parallel, config.model.architecture.num_hidden_layers
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return [layers]
    first = [size] if (size := parallel.num_layers_in_first_pipeline_stage) else []
    last = [size] if (size := parallel.num_layers_in_last_pipeline_stage) else []
    others = stages - len(first) - len(last)
    return [*first, *[(layers - sum(first) - sum(last)) // max(others, 1)] * others, *last]


def stage_chunks(config: Config) -> tuple[tuple[range, ...], ...]:
    """Return the decoder layers of each pipeline stage, first to last, in chunks of consecutive layers.

    Example:
        8 layers on 2 stages of 2 chunks: 0 to 1 and 4 to 5 on the first, 2 to 3 and 6 to 7 on the last.
    """
    return _chunks(tuple(layers_per_stage(config)), config.parallel.virtual_pipeline_model_parallel_size)


@lru_cache(maxsize=1024)
def _chunks(of_stages: tuple[int, ...], chunks: int) -> tuple[tuple[range, ...], ...]:
    sizes = [layers // chunks for layers in of_stages]
    ends = list(accumulate(sizes))
    turns = [turn * ends[-1] for turn in range(chunks)]
    return tuple(
        tuple(range(turn + end - size, turn + end) for turn in turns) for size, end in zip(sizes, ends, strict=True)
    )


def micro_batch_multiple(config: Config) -> int:
    """Return the divisor of a rank's micro-batches per update: the number of stages, if they interleave, else 1."""
    parallel = config.parallel
    return parallel.pipeline_model_parallel_size if parallel.virtual_pipeline_model_parallel_size > 1 else 1


def fp8_settings(config: Config) -> dict[str, Any]:
    """Return the settings that determine the engines' FP8 weights, apart from the source."""
    quantize = config.quantize
    return {"format": "fp8", "strategy": quantize.strategy, "scale": quantize.scale, **_kept(config)}


def start_settings(config: Config) -> dict[str, Any]:
    """Return the settings that determine the files of FP8 engines that start without weights, source apart."""
    return {**fp8_settings(config), "drafts": config.engine.mtp_steps > 0}


def serving_settings(config: Config) -> dict[str, Any]:
    """Return the settings that determine the serving checkpoint, apart from the source."""
    serving = config.serving
    calibrated = {"passes": calibration_settings(config)} if is_calibrated_here(config) else {}
    return {"format": serving.format, "calibration": list(serving.calibration), **calibrated, **_kept(config)}


def is_calibrated_here(config: Config) -> bool:
    """Return whether the serving checkpoint needs activation magnitudes from the rule `calibrate`."""
    serving = config.serving
    return serving.format == "nvfp4" and not serving.calibration and not serving.uncalibrated


def calibration_passes(config: Config) -> dict[str, CalibrationPass]:
    """Return name -> calibration pass."""
    return {name: wanted for name, wanted in config.serving.passes.items() if wanted.num_samples}


def calibration_settings(config: Config) -> dict[str, Any]:
    """Return the settings that determine a calibration's magnitudes, apart from weights and layout."""
    passes = {name: dataclasses.asdict(wanted) for name, wanted in calibration_passes(config).items()}
    return {"passes": passes, "chat_template_kwargs": list(config.data.chat_template_kwargs)}


def calibrating(config: Config) -> Config:
    """Return the configuration of calibration ranks: training's layout, without engines or spare nodes."""
    slurm = dataclasses.replace(config.site.slurm, spare_nodes=0)
    engine = dataclasses.replace(config.engine, own_nodes=0)
    site = dataclasses.replace(config.site, slurm=slurm)
    algorithm = dataclasses.replace(config.algorithm, routing_replay=False)
    return dataclasses.replace(config, nodes=trainer_nodes(config), engine=engine, site=site, algorithm=algorithm)


def recoding_settings(config: Config, step: str) -> dict[str, Any]:
    """Return the settings that determine a recoded checkpoint, for the step that makes its parts."""
    of_step = {
        "quantize_rollout_fp8": fp8_settings,
        "quantize_rollout_start": start_settings,
        "quantize_export_fp8": fp8_settings,
        "quantize_serving": serving_settings,
        "quantize_export_serving": serving_settings,
    }
    return of_step[step](config) if step in of_step else {"format": "bf16"}


def _kept(config: Config) -> dict[str, Any]:
    quantize = config.quantize
    return {
        "keep_first_layers": quantize.keep_first_layers,
        "keep_last_layers": quantize.keep_last_layers,
        "keep_modules": list(quantize.keep_modules),
    }
