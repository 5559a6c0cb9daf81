"""The section `hardware`: one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.document import _doc


@dataclass(frozen=True)
class Kernels:
    """Engine settings that depend on the hardware; empty or 0: the default."""

    dsa_prefill: str = _doc("Back end of sparse attention in prefill (`--dsa-prefill-backend`)", "")
    dsa_decode: str = _doc("Back end of sparse attention in decoding (`--dsa-decode-backend`)", "")
    moe_runner_fp8: str = _doc("Back end of experts with FP8 weights (`--moe-runner-backend`)", "")
    moe_runner_bf16: str = _doc("Back end of experts with BF16 weights (`--moe-runner-backend`)", "")
    moe_runner_fixed_fp8: str = _doc("Back end of experts with FP8 weights that are served and never updated", "")
    moe_runner_fixed_nvfp4: str = _doc("Back end of experts with NVFP4 weights, which are never updated", "")
    attention: str = _doc(
        "Back end of attention for models with an indexer, on hardware without a sparse one (`--attention-backend`)", ""
    )
    allreduce_fusion: bool = _doc("All-reduce fused with the norm that follows", False)
    custom_allreduce: bool = _doc("SGLang's own all-reduce works (off: `--disable-custom-all-reduce`)", True)
    speculative: bool = _doc("EAGLE decoding with the MTP layer works", True)
    chunked_prefill_tokens: int = _doc("Tokens of a prefill chunk (`--chunked-prefill-size`)", 0, minimum=0)
    watchdog_seconds: int = _doc(
        "An engine's scheduler without progress for this long is ended (`--watchdog-timeout`)", 0, minimum=0
    )
    environment: list[str] = _doc("Environment variables of engines, `NAME=VALUE`", [])


@dataclass(frozen=True)
class Hardware:
    """A kind of machine. Rates are data-sheet peaks, dense and in one direction; GB are 10^9 bytes."""

    name: str = _doc("Name; the file `config/hardware/{name}.yaml`")
    device: str = _doc("Device of the tensors", choices=("cuda", "cpu"))
    gpus_per_node: int = _doc("GPUs per node; on CPU, trainer ranks per node", minimum=1)
    linked_gpus: int = _doc(
        "GPUs joined by NVLink or xGMI across nodes; 0: those of a node. Tensor parallelism stays within them",
        0,
        minimum=0,
    )
    memory_gib_per_gpu: float = _doc("Memory the driver reports per GPU; on CPU, per node", exclusive_minimum=0)
    bf16_tflops: float = _doc("BF16 matrix products per GPU, 10^12 operations per second", exclusive_minimum=0)
    fp8_tflops: float = _doc(
        "FP8 matrix products per GPU; if emulated, the rate of the emulating precision", exclusive_minimum=0
    )
    hbm_gb_per_s: float = _doc("Memory bandwidth per GPU", exclusive_minimum=0)
    gpu_link_gb_per_s: float = _doc("NVLink or xGMI bandwidth per GPU to the others of its node", exclusive_minimum=0)
    network_gb_per_s: float = _doc("Network bandwidth between nodes, per node", exclusive_minimum=0)
    host_memory_gib: float = _doc("Host memory per node", exclusive_minimum=0)
    local_disk_gb: float = _doc("Capacity of a node's own disk", exclusive_minimum=0)
    local_disk_gb_per_s: float = _doc("Sequential write rate of that disk", exclusive_minimum=0)
    formats: list[str] = _doc("Formats of the matrix units: bf16, fp8 (E4M3FN), nvfp4")
    emulated_formats: list[str] = _doc("Formats that software emulates in another precision", [])
    compute_capability: str = _doc(
        "NVIDIA's number of the GPU's architecture, quoted: 9.0 is Hopper, 10.0 Blackwell; empty: not NVIDIA",
        "",
    )
    deepep: bool = _doc("Engines can use DeepEP")
    trainer_deepep: bool = _doc("The trainer can use DeepEP")
    trainer_deepep_reason: str = _doc("Why the trainer cannot", "")
    kernels: Kernels = field(default_factory=Kernels, metadata={"doc": "Switches of the engine"})
