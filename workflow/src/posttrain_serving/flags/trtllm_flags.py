"""Flags and the YAML of TensorRT-LLM's server, which were never run or parsed here.

Source: `tensorrt-llm-glm5.txt`. Its configuration is for latency; for throughput it only has the smaller number of
tokens.
"""

from __future__ import annotations

from typing import Any

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import Flag, flag

GUIDE = "TensorRT-LLM's guide to GLM-5"
CONTAINER = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc3"
YAML_FILE = "config.yml"
MAX_BATCH, GRAPH_BATCH, STREAM_INTERVAL = 32, 1024, 10
MAX_TOKENS = {"latency": 8192, "throughput": 3072}


def trtllm_flags(config: Config, goal: str) -> list[Flag]:
    """Return trtllm-serve's command line without checkpoint and address."""
    ranks, key = config.engine.gpus_per_engine, "engine.gpus_per_engine"
    smaller = f"{GUIDE}: for throughput so few, or memory runs out"
    return [
        flag("--backend", "pytorch", reason=GUIDE),
        flag("--max_batch_size", MAX_BATCH, reason=GUIDE),
        flag("--max_num_tokens", MAX_TOKENS[goal], reason=GUIDE if goal == "latency" else smaller),
        flag("--tp_size", ranks, key, reason=f"{GUIDE}: all GPUs of the node"),
        flag("--ep_size", ranks, key, reason=GUIDE),
        flag("--pp_size", 1, reason=GUIDE),
        flag("--config", f"./{YAML_FILE}", reason="what has no flag"),
    ]


def trtllm_yaml(goal: str) -> dict[str, Any]:
    """Return the content of `YAML_FILE`.

    DP attention, in which each GPU attends to its own requests, is on for throughput (SGLang's cookbook, section 3.2);
    the guide, which is for latency, has it off.
    """
    return {
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": GRAPH_BATCH},
        "enable_attention_dp": goal == "throughput",
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": False, "dtype": "fp8"},
        "stream_interval": STREAM_INTERVAL,
    }
