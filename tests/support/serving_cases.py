"""What is asked for in the seeds, and what else commands are pinned and parsed for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.published_sizes import COOKBOOK

from posttrain.config.load import merge
from posttrain.config.schema import Config, Hardware
from posttrain_serving.checkpoint import Checkpoint, find_checkpoint
from posttrain_serving.launch import Launch, plan_launch
from posttrain_serving.serve_request import ServeRequest

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"
NAMES = sorted(path.stem for path in (CONFIG_DIR / "hardware").glob("*.yaml"))
MORE = {
    "throughput": ("glm5", "h200", {"precision": "fp8", "goal": "throughput"}),
    "b200-throughput": ("glm5", "b200", {"precision": "fp8", "goal": "throughput"}),
    "gb300": ("glm5", "gb300", {"precision": "fp8"}),
    "index-cache": ("glm5", "h200", {"precision": "fp8", "index_cache": True}),
    "prefill-apart": ("glm5", "h200", {"precision": "fp8", "prefill_apart": True, "goal": "throughput"}),
    "card": ("lukealonso/GLM-5-NVFP4", "rtx_pro_6000", {"host": "0.0.0.0"}),
    "nvfp4-b200": ("glm5", "b200", {"precision": "nvfp4"}),
    "deepseek": ("deepseek_v3.2", "h200", {}),
    "air": ("glm4.5_air", "h100", {}),
    "dense": ("qwen3_4b", "h100", {}),
    "cpu": ("qwen3_0.6b", "cpu", {}),
}
VLLM = {
    "vllm-fp8": ("zai-org/GLM-5-FP8", "b200", {"engine": "vllm"}),
    "vllm-nvfp4": ("lukealonso/GLM-5-NVFP4", "b200", {"engine": "vllm"}),
    "vllm-nodes": ("glm5", "h100", {"engine": "vllm", "precision": "fp8"}),
    "vllm-air": ("glm4.5_air", "h100", {"engine": "vllm"}),
    "vllm-dense": ("qwen3_4b", "h200", {"engine": "vllm"}),
}
SGLANG = {f"{name}-{precision}": ("glm5", name, {"precision": precision}) for name, precision, _ in COOKBOOK} | MORE


@cache
def machine(name: str) -> Config:
    """Return a configuration with some hardware."""
    return merge({"model": "tiny", "site": "local", "hardware": name}, CONFIG_DIR).config


@cache
def all_hardware() -> tuple[Hardware, ...]:
    """Return what may be the nearest that works."""
    return tuple(machine(name).hardware for name in NAMES)


def checkpoint(what: str, precision: str = "", results: Path = Path("results")) -> Checkpoint:
    """Return what a name on the command line means."""
    return find_checkpoint(what, precision, [CONFIG_DIR], results)


def launch(what: str, hardware: str, **serve_request: object) -> Launch:
    """Return how something is served."""
    asked = ServeRequest.of(serve_request)
    return plan_launch(asked, checkpoint(what, asked.precision), machine(hardware), all_hardware())


@cache
def launches() -> dict[str, Launch]:
    """Return name -> launch of every case."""
    return {name: launch(what, hardware, **more) for name, (what, hardware, more) in {**SGLANG, **VLLM}.items()}
