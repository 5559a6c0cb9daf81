"""Notes before an engine is started: omitted features and why, slow steps, possible failures."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import Flag
from posttrain_serving.checkpoint import Checkpoint
from posttrain_serving.flags.serving_flags import CARD, COOKBOOK, PARSERS, renamed
from posttrain_serving.flags.trtllm_flags import CONTAINER
from posttrain_serving.flags.trtllm_flags import GUIDE as TRTLLM_GUIDE
from posttrain_serving.flags.vllm_flags import CONTAINER as VLLM_CONTAINER
from posttrain_serving.flags.vllm_flags import GUIDE as VLLM_GUIDE
from posttrain_serving.flags.vllm_flags import JIT_KERNELS, JIT_MINUTES, OLDEST, OLDEST_TRANSFORMERS
from posttrain_serving.serve_request import ServeRequest


def notes_of(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config, flags: Iterable[Flag]) -> list[str]:
    """Return notes as sentences, most important first."""
    found = [f"{checkpoint.place} is not there yet: {checkpoint.missing}"] if checkpoint.missing else []
    if config.nodes > 1 or serve_request.prefill_apart:
        found.append("node0, prefill0 and decode0 stand for addresses of the nodes; each command runs on its own")
    of_engine = {"sglang": _sglang, "vllm": _vllm, "trtllm": _trtllm, "embedded": _embedded}[serve_request.engine]
    spelled = renamed(dict.fromkeys(flags)) if serve_request.engine == "sglang" else []
    return [*found, *of_engine(serve_request, checkpoint, config), *spelled]


def _sglang(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config) -> list[str]:
    kernels, arch, found = config.hardware.kernels, checkpoint.architecture, []
    if serve_request.index_cache:
        found.append(f"IndexCache loses a little accuracy: leave it out where accuracy is measured ({COOKBOOK})")
    if arch.num_nextn_predict_layers and not kernels.speculative:
        found.append(f"no EAGLE: SGLang does not draft for GLM-5 on {config.hardware.name} yet ({COOKBOOK})")
    elif arch.num_nextn_predict_layers and serve_request.goal == "latency" and checkpoint.precision == "nvfp4":
        found.append(f"no EAGLE: {CARD} serves without, and a community's checkpoint may lack the layer")
    if arch.n_routed_experts and config.hardware.device == "cuda":
        slower = (
            "DP attention costs latency while few ask"
            if serve_request.goal == "throughput"
            else "no DP attention: few ask"
        )
        found.append(f"{slower} ({COOKBOOK})")
    if config.hardware.name == "rtx_pro_6000":
        found.append(f"if NCCL hangs: iommu=pt in the kernel's command line, and amd_iommu=pt on AMD ({CARD})")
    if arch.model_type not in PARSERS and config.hardware.device == "cuda":
        found.append(f"no parser of thinking and tool calls is known here for {arch.model_type}")
    if config.hardware.device == "cuda":
        found.append("flags are spelled as SGLang 0.5.23 parses them, which names transformers 5.19.0")
    if serve_request.prefill_apart:
        found.append("no request reaches engines that prefill or decode but through the router (pip: sglang-router)")
    return found


def _vllm(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config) -> list[str]:
    found = [f"--goal {serve_request.goal}: the guide has one command for both"]
    found.append("flags are spelled as vLLM 0.32.0 parses them")
    if checkpoint.architecture.index_n_heads:
        needs = f"vLLM {OLDEST} or newer, with transformers {OLDEST_TRANSFORMERS} or newer"
        found.append(f"{needs}: older ones do not know the architecture ({VLLM_GUIDE})")
        found.append(f"or in the container {VLLM_CONTAINER}, started with --gpus all --ipc=host ({VLLM_GUIDE})")
    if checkpoint.precision == "fp8":
        minutes = f"about {JIT_MINUTES} minutes for {JIT_KERNELS:,} kernels"
        found.append(f"the first start compiles DeepGEMM, {minutes}: nvcc on PATH and CUTLASS's headers ({VLLM_GUIDE})")
    if config.hardware.name != "b200":
        found.append(f"the guide is for B200; on {config.hardware.name} nothing but memory was looked at")
    return found


def _trtllm(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config) -> list[str]:
    found = [
        "nothing of TensorRT-LLM was ever run or parsed here: command, YAML and patch are the guide's",
        f"inside {CONTAINER} with GLM-5's change installed, started with --gpus all --ipc=host "
        f"--ulimit memlock=-1 --ulimit stack=67108864 ({TRTLLM_GUIDE})",
        f"out of memory: a smaller kv_cache_free_gpu_mem_fraction, max_batch_size or max_num_tokens ({TRTLLM_GUIDE})",
    ]
    if serve_request.goal == "throughput":
        found.append("the guide has no configuration for throughput: what differs is the tokens and DP attention")
    return found


def _embedded(serve_request: ServeRequest, checkpoint: Checkpoint, config: Config) -> list[str]:
    return ["whoever asks shows the secret of its environment: Authorization: Bearer (docs/threat-model.md)"]
