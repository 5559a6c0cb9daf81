"""The servers that generate during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.document import _doc

# The environment variable with the secret that engines demand from their clients.
SECRET_VARIABLE = "POSTTRAIN_ENGINE_SECRET"


@dataclass(frozen=True)
class PrefillDecode:
    """Engines that only prefill, beside the others, which then only decode (PD disaggregation)."""

    num_prefill_engines: int = _doc("Engines that only prefill; 0: every engine does both", 0, minimum=0)
    gpus_per_prefill_engine: int = _doc("GPUs of such an engine (its world size)", 8, minimum=1)
    max_running_requests: int = _doc("Requests that such an engine works on at a time", 512, minimum=1)
    transfer_backend: str = _doc(
        "What carries the KV cache to the engines that decode", "mooncake", choices=("mooncake", "nixl")
    )


@dataclass(frozen=True)
class Engine:
    """The servers that generate."""

    kind: str = _doc(
        "sglang: a real SGLang server; embedded: our server over transformers", "sglang", choices=("sglang", "embedded")
    )
    python: str = _doc("Interpreter of the SGLang environment; empty: the workflow's own", "")
    num_engines: int = _doc("Engines per run, without those that only prefill", 1, minimum=1)
    gpus_per_engine: int = _doc("GPUs of one engine (its world size)", 8, minimum=1)
    own_nodes: int = _doc(
        "Nodes of the job that only engines have, its last ones; trainer ranks are on the others then, and nobody "
        "sleeps. 0: engines share the trainer's nodes and GPUs",
        0,
        minimum=0,
    )
    dtype: str = _doc(
        "Precision of unquantised weights and activations in the engine", "bfloat16", choices=("bfloat16", "float32")
    )
    port: int = _doc("First port; 0: free ports are chosen", 0, minimum=0, maximum=65535)
    mem_fraction_static: float = _doc(
        "Share of GPU memory for weights and KV cache", 0.7, exclusive_minimum=0, maximum=1
    )
    max_running_requests: int = _doc("Requests served at a time", 512, minimum=1)
    groups_per_request: int = _doc(
        "Sample groups sent in one request: the batch that an engine keeps together, and the unit that is persisted",
        1,
        minimum=1,
    )
    sleep: str = _doc(
        "Trainer and engines take turns on their GPUs, each in host memory while the other works: always, never (both "
        "have to fit at a time), or auto: on GPUs",
        "auto",
        choices=("auto", "always", "never"),
    )
    weight_transport: str = _doc(
        "How new weights reach the engines: sharded (from each rank that has a part to each that keeps it), tensor "
        "(all through rank 0, over HTTP), disk (through shared files); auto: sharded with SGLang, else tensor",
        "auto",
        choices=("auto", "sharded", "tensor", "disk"),
    )
    weight_deltas: bool = _doc(
        "Ranks keep in host memory what they have sent, and send of each part what has changed since, where that is "
        "less (with weight_transport=sharded, and engines that do not sleep)",
        False,
    )
    weight_bucket_mib: int = _doc("Largest bucket of a weight update", 2048, minimum=1)
    start_timeout_seconds: float = _doc("An engine must answer within this", 1800.0, exclusive_minimum=0)
    request_timeout_seconds: float = _doc("A request must be answered within this", 3600.0, exclusive_minimum=0)
    num_threads: int = _doc("CPU threads of an engine; 0: torch's choice", 0, minimum=0)
    dp_attention: bool = _doc(
        "Each GPU attends for requests of its own, which suits many requests; off: GPUs share each request's heads, "
        "which suits few (CUDA only)",
        True,
    )
    deepep: bool = _doc(
        "DeepEP carries tokens to experts, in engines with FP8 weights and on hardware that has it", True
    )
    deterministic: bool = _doc(
        "SGLang on GPUs samples each response from its own seed, by kernels whose sums do not depend on the batch: "
        "slower, and a resumed run has the samples of an undisturbed one on the same hardware. On CPUs it always is so",
        False,
    )
    mtp_steps: int = _doc(
        "Tokens that the MTP layer drafts ahead (EAGLE); 0: no speculation. The draft is not trained: it slows down as "
        "the policy moves away from it, and never changes what is sampled",
        0,
        minimum=0,
        maximum=16,
    )
    graph_batch_size: int = _doc(
        "Largest decode batch per data-parallel rank that is captured as a CUDA graph; 0: the recipe's, which is 256, "
        "or beside engines that only prefill 8 or what a step gives a rank, if that is more",
        0,
        minimum=0,
    )
    pd: PrefillDecode = field(default_factory=PrefillDecode, metadata={"doc": "Prefill apart from decode"})
