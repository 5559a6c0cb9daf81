"""SGLang's flags for serving weights that are never updated.

Flags of parallelism, attention, speculation, disaggregation and nodes come from training's `sglang_flags`. The flags
here differ, because there are no weight updates, no sleep, and no comparison with a trainer's log-probabilities.

Sources: `sglang-glm5-cookbook.txt`, section 3.2; `glm5-nvfp4-model-card.txt`, "How to Run".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from posttrain.config.schema import Config
from posttrain.plan.flags.environment import hardware_environment, site_environment
from posttrain.plan.flags.flag import Flag, flag
from posttrain.plan.flags.sglang_flags import (
    UNIFIED,
    all_reduce,
    attention_kernels,
    cpu_flags,
    disaggregation,
    environment_flags,
    is_mixture,
    kv_page,
    node_count,
    nodes_per_engine,
    parallelism,
    speculation,
)

COOKBOOK = "SGLang's cookbook for GLM-5, section 3.2"
CARD = "the card of lukealonso/GLM-5-NVFP4"
# Flags that older guides spell differently than SGLang 0.5.23: new name -> (old name, how SGLang treats it).
RENAMED = {
    "--attention-backend dsa": ("--attention-backend nsa", "still takes"),
    "--dsa-prefill-backend": ("--nsa-prefill-backend", "refuses"),
    "--dsa-decode-backend": ("--nsa-decode-backend", "refuses"),
    "--flashinfer-allreduce-fusion-backend": ("--enable-flashinfer-allreduce-fusion", "deprecates"),
    "--attn-dp-size": ("--enable-dp-attention with --dp-size", "deprecates"),
}
# Our default, because no guide has a number; the rest is for activations, graphs and buffers.
MEM_FRACTION = 0.85
# (hardware, precision, goal) -> share of GPU memory, concurrent requests, source.
PUBLISHED = {("rtx_pro_6000", "nvfp4", "latency"): (0.95, 8, CARD)}
# Parsers that separate reasoning and tool calls from the answer, and their source.
# SGLang and vLLM have the same names.
_OF_QWEN = ("qwen3", "qwen3_coder", "SGLang's cookbook for Qwen3.5")
PARSERS = {
    "glm_moe_dsa": ("glm45", "glm47", CARD),
    "glm4_moe": ("glm45", "glm45", "the README of zai-org/GLM-4.5"),
    "qwen3_5": _OF_QWEN,
    "qwen3_5_moe": _OF_QWEN,
}
QUANTIZATION = {"fp8": "fp8", "nvfp4": "modelopt_fp4"}
# One letter per layer of GLM-5: F computes its own keys, S shares those of the layer before.
INDEX_CACHE = "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS"
MTP_STEPS = 3
# The cookbook's loading time of GLM-5 on AMD's GPUs, the only published one; other GPUs load no slower.
LOADING_SECONDS = 1200
# Twice the cold-start time in vLLM's guide, about 5 minutes on a B200.
COMPILING_SECONDS = 600
DRAFTS = f"{COOKBOOK}: drafts cut latency; their numbers are those of training's recipe"
FEWEST = "the fewest GPUs that hold the weights and one request of 32,768 tokens, or all of the nodes asked for"
WHOLE, CUT = "experts are spread whole, as in training's recipe", "each GPU has a part of every expert"
# Sources of the kernels for fixed weights of a precision.
FIXED = {"fp8": f"{COOKBOOK}, B200 (FP8)", "nvfp4": CARD}


_APART = f"{COOKBOOK}: for throughput each GPU attends for requests of its own"
_RANKS = {
    "--tp-size": FEWEST,
    "--attn-dp-size": _APART,
    "--moe-dense-tp-size": "training's recipe: each GPU has the dense layers",
    "--enable-dp-lm-head": "training's recipe: no gather before the logits",
}


def serving_flags(config: Config, precision: str, goal: str, role: str = UNIFIED, method: str = "") -> list[Flag]:
    """Return SGLang's command line without checkpoint and address.

    Args:
        config: Has the serving engine; `engine.mem_fraction_static` is used.
        precision: Precision of the weights: "bf16", "fp8", "nvfp4".
        goal: "latency" or "throughput".
        role: "unified", "prefill" or "decode".
        method: Quantisation method of the checkpoint, if known.
    """
    flags = parsers(config)
    if config.hardware.device == "cpu":
        return [*flags, flag("--dtype", config.engine.dtype, "engine.dtype"), *cpu_flags(config, role)]
    parts = (
        _memory(config, precision, goal),
        _weights(precision, method),
        _hardware(config),
        _ranks(config, precision, role),
        kv_page(config, role),
        [_told_of_keys(config, item) for item in attention_kernels(config, role)],
        _experts(config, precision),
        [_told(item, FIXED.get(precision, COOKBOOK)) for item in all_reduce(config, role)],
        [_told(item, DRAFTS) for item in speculation(config, role)],
        disaggregation(config, role),
        node_count(config, role),
    )
    return [*flags, *(item for part in parts for item in part)]


def serving_environment(config: Config, role: str = UNIFIED) -> list[Flag]:
    """Return the environment variables of a serving engine."""
    if config.hardware.device == "cpu":
        return environment_flags(config, role)
    is_alone = role == UNIFIED and nodes_per_engine(config, role) == 1
    return [*hardware_environment(config, is_alone), *site_environment(config, "engine_environment")]


def parsers(config: Config) -> list[Flag]:
    """Return the flags by which OpenAI endpoints separate reasoning and tool calls from the answer."""
    if not (known := PARSERS.get(config.model.architecture.model_type)):
        return []
    reasoning, tools, source = known
    key = "model.architecture.model_type"
    return [
        flag("--reasoning-parser", reasoning, key, reason=f"{source}: endpoints give thinking apart"),
        flag("--tool-call-parser", tools, key, reason=f"{source}: endpoints give calls of tools apart"),
    ]


def index_cache() -> Flag:
    """Return the flag by which layers of GLM-5 share an earlier layer's choice of keys (opt-in)."""
    reason = f"asked for (IndexCache, {COOKBOOK}): fewer choices of keys, for a small loss of accuracy"
    return flag("--json-model-override-args", f'{{"index_topk_pattern": "{INDEX_CACHE}"}}', reason=reason)


def renamed(flags: Iterable[Flag]) -> list[str]:
    """Return a sentence for each flag that older guides spell differently."""
    found = []
    for item in flags:
        for name in (item.name, f"{item.name} {item.value}"):
            if name in RENAMED:
                old, fate = RENAMED[name]
                found.append(f"{name}: older guides say {old}, which SGLang 0.5.23 {fate}")
    return found


def _memory(config: Config, precision: str, goal: str) -> list[Flag]:
    share, key = config.engine.mem_fraction_static, "engine.mem_fraction_static"
    published = PUBLISHED.get((config.hardware.name, precision, goal))
    ours = f"{COOKBOOK}, asks for one and has no number: {MEM_FRACTION}, or what weights and one long request need"
    flags = [flag("--mem-fraction-static", share, key, reason=published[2] if published else ours)]
    if published:
        flags.append(flag("--max-running-requests", published[1], "engine.max_running_requests", reason=published[2]))
    kv, why = ("fp8_e4m3", CARD) if precision == "nvfp4" else ("bf16", "attention as the trainer computes it")
    return [*flags, flag("--kv-cache-dtype", kv, reason=why)]


def ready_seconds(config: Config, compiles: bool) -> float:
    """Return the time limit for an engine to become healthy, in seconds.

    Args:
        config: Has the hardware, whose file may set the loading time.
        compiles: The engine compiles kernels at its first start.
    """
    loading = config.hardware.kernels.watchdog_seconds or LOADING_SECONDS
    return float(loading + (COMPILING_SECONDS if compiles else 0))


def _weights(precision: str, method: str) -> list[Flag]:
    if precision not in QUANTIZATION:
        return []
    value = method if method == "compressed-tensors" else QUANTIZATION[precision]
    reason = "a checkpoint that says otherwise is refused"
    return [flag("--quantization", value, reason=f"{FIXED[precision]}; {reason}")]


def _hardware(config: Config) -> list[Flag]:
    kernels, flags = config.hardware.kernels, []
    if kernels.chunked_prefill_tokens:
        key = "hardware.kernels.chunked_prefill_tokens"
        flags.append(flag("--chunked-prefill-size", kernels.chunked_prefill_tokens, key, reason=COOKBOOK))
    if kernels.watchdog_seconds:
        reason = f"{COOKBOOK}: loading takes up to {kernels.watchdog_seconds // 60} minutes"
        key = "hardware.kernels.watchdog_seconds"
        flags.append(flag("--watchdog-timeout", kernels.watchdog_seconds, key, reason=reason))
    return flags


def _ranks(config: Config, precision: str, role: str) -> list[Flag]:
    """Return training's flags with serving's reasons; kernels for fixed weights do not support expert parallelism."""
    flags = []
    for item in parallelism(config, role):
        if item.name == "--ep-size" and _fixed_runner(config, precision):
            key = f"hardware.kernels.moe_runner_fixed_{precision}"
            flags.append(flag("--ep-size", 1, key, reason=f"{FIXED[precision]}: {CUT}"))
        else:
            flags.append(_told(item, _RANKS.get(item.name, CUT if item.value == 1 else WHOLE)))
    return flags


def _experts(config: Config, precision: str) -> list[Flag]:
    runner, key = _fixed_runner(config, precision), f"hardware.kernels.moe_runner_fixed_{precision}"
    return [flag("--moe-runner-backend", runner, key, reason=FIXED[precision])] if runner else []


def _fixed_runner(config: Config, precision: str) -> str:
    if not is_mixture(config):
        return ""
    return str(getattr(config.hardware.kernels, f"moe_runner_fixed_{precision}", ""))


def _told_of_keys(config: Config, item: Flag) -> Flag:
    if config.hardware.kernels.attention:
        return _told(item, f"{CARD}; it reads all keys, where the model was trained to read those that it chooses")
    ours = "training's recipe, where the cookbook names none"
    return _told(item, COOKBOOK if config.hardware.kernels.dsa_decode else ours)


def _told(item: Flag, reason: str) -> Flag:
    return dataclasses.replace(item, reason=reason)
