"""The section `hardware`: one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.document import _doc


@dataclass(frozen=True)
class Kernels:
    """Switches of the engine that depend on the hardware; empty or 0: as on all other hardware."""

    dsa_prefill: str = _doc("Sparse attention of the prefill (`--dsa-prefill-backend`)", "")
    dsa_decode: str = _doc("Sparse attention of the decoding (`--dsa-decode-backend`)", "")
    moe_runner_fp8: str = _doc("Experts with FP8 weights (`--moe-runner-backend`)", "")
    moe_runner_bf16: str = _doc("Experts with BF16 weights (`--moe-runner-backend`)", "")
    moe_runner_fixed_fp8: str = _doc("The same for FP8 weights that are served and never updated", "")
    moe_runner_fixed_nvfp4: str = _doc("The same for NVFP4 weights, which never are", "")
    attention: str = _doc(
        "Attention of models with an indexer where no back end for chosen keys runs (`--attention-backend`)", ""
    )
    allreduce_fusion: bool = _doc("All-reduce fused with the norm that follows", False)
    custom_allreduce: bool = _doc("SGLang's own all-reduce works (off: `--disable-custom-all-reduce`)", True)
    speculative: bool = _doc("EAGLE decoding with the MTP layer works", True)
    chunked_prefill_tokens: int = _doc("Tokens of a prefill chunk (`--chunked-prefill-size`)", 0, minimum=0)
    watchdog_seconds: int = _doc("A scheduler silent for this long is ended (`--watchdog-timeout`)", 0, minimum=0)
    environment: list[str] = _doc("Variables of engines, `NAME=VALUE`", [])


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. Rates are peaks of the data sheets, dense and in one direction; GB are 10^9 bytes."""

    name: str = _doc("Name; the file `config/hardware/{name}.yaml`")
    device: str = _doc("Where tensors live", choices=("cuda", "cpu"))
    gpus_per_node: int = _doc("GPUs per node; on CPU, trainer ranks per node", minimum=1)
    linked_gpus: int = _doc(
        "GPUs that NVLink or xGMI joins, where it joins nodes; 0: those of a node. Tensor parallelism stays among them",
        0,
        minimum=0,
    )
    memory_gib_per_gpu: float = _doc("Memory the driver reports per GPU; on CPU, per node", exclusive_minimum=0)
    bf16_tflops: float = _doc("BF16 matrix products per GPU, 10^12 operations per second", exclusive_minimum=0)
    fp8_tflops: float = _doc("FP8 matrix products per GPU; emulated: as fast as what emulates", exclusive_minimum=0)
    hbm_gb_per_s: float = _doc("Memory bandwidth per GPU", exclusive_minimum=0)
    gpu_link_gb_per_s: float = _doc("NVLink or xGMI per GPU to the others of its node", exclusive_minimum=0)
    network_gb_per_s: float = _doc("Network between nodes, per node", exclusive_minimum=0)
    host_memory_gib: float = _doc("Host memory per node", exclusive_minimum=0)
    local_disk_gb: float = _doc("A node's own disk", exclusive_minimum=0)
    local_disk_gb_per_s: float = _doc("Sequential writes to it", exclusive_minimum=0)
    formats: list[str] = _doc("What the matrix units compute with: bf16, fp8 (E4M3FN), nvfp4")
    emulated_formats: list[str] = _doc("Formats that software computes with in another precision", [])
    compute_capability: str = _doc(
        "NVIDIA's number of the GPU's architecture, quoted: 9.0 is Hopper, 10.0 Blackwell; empty: another GPU",
        "",
    )
    deepep: bool = _doc("DeepEP works on it in engines")
    trainer_deepep: bool = _doc("DeepEP works on it in the trainer")
    trainer_deepep_reason: str = _doc("Why it does not", "")
    kernels: Kernels = field(default_factory=Kernels, metadata={"doc": "Switches of the engine"})
