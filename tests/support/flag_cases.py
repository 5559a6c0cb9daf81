"""Branches x hardware x switches whose flags are pinned by golden files and held against the vendors' own parsers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from posttrain.config.load import Resolved
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"

# 32 nodes of 4 GPUs have the 128 GPUs that the recipe of 16 nodes is written for.
LAYOUT = (
    "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=4 parallel.context_parallel_size=2 "
    "parallel.expert_model_parallel_size=32 parallel.num_layers_in_last_pipeline_stage=18 "
    "engine.gpus_per_engine=64 engine.num_engines=1 "
    "engine.pd.num_prefill_engines=1 engine.pd.gpus_per_prefill_engine=64"
)
# What `set=` adds, by hardware.
HARDWARE = {"h100": "", "h200": "", "b200": "", "gb300": LAYOUT, "mi300x": "rollout.fp8=false"}
NO_PREFILL = "engine.pd.num_prefill_engines=0"
SWITCHES = {
    "recipe": "",
    "bf16_rollout": "rollout.fp8=false",
    "no_deepep": "engine.deepep=false trainer.deepep=false",
    "few_requests": f"engine.dp_attention=false engine.gpus_per_engine=8 engine.num_engines=16 {NO_PREFILL}",
    "mtp": "engine.mtp_steps=3",
    "unified": f"engine.num_engines=2 {NO_PREFILL}",
    "unified_mtp": f"engine.num_engines=2 {NO_PREFILL} engine.mtp_steps=3",
    "offload": "trainer.optimizer_cpu_offload=true",
    "no_recompute": "trainer.recompute_granularity=none",
}
# The cookbook has neither EAGLE nor FP8 for sparse attention on AMD, and its recipe is therefore BF16.
NOT_THERE = {("mi300x", switch) for switch in ("mtp", "unified_mtp", "bf16_rollout", "no_deepep")}
SMALL = {
    "tiny-embedded": {"model": "tiny"},
    "tiny-sglang": {"model": "tiny", "set": "engine.kind=sglang engine.num_threads=1"},
    "glm5_4layer-h200-recipe": {"model": "glm5_4layer"},
    "glm5_20layer-h200-recipe": {"model": "glm5_20layer"},
    "glm5.1-h200-recipe": {"model": "glm5.1"},
    "glm5-32_nodes-recipe": {"model": "glm5", "nodes": 32},
    "glm5-16_nodes-production": {"model": "glm5", "recipe": "production"},
    "glm4.5_air-recipe": {"model": "glm4.5_air"},
    "qwen3_30b_a3b-recipe": {"model": "qwen3_30b_a3b"},
    "qwen3_4b-recipe": {"model": "qwen3_4b"},
    "qwen3_4b-deterministic": {"model": "qwen3_4b", "set": "engine.deterministic=true"},
}


# Name -> what is chosen.
CASES = SMALL | {
    f"glm5-{hardware}-{switch}": {
        "model": "glm5",
        "nodes": 32 if hardware == "gb300" else 16,
        "hardware": hardware,
        "set": f"{machine} {text}",
    }
    for hardware, machine in HARDWARE.items()
    for switch, text in SWITCHES.items()
    if (hardware, switch) not in NOT_THERE
}


@cache
def flag_case(name: str) -> Resolved:
    """Return the configuration of a case."""
    return resolve({"site": "local", **CASES[name]}, CONFIG_DIR)


def flag_cases() -> dict[str, Resolved]:
    """Return name -> configuration of every case."""
    return {name: flag_case(name) for name in CASES}
