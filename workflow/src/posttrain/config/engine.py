"""The inference engines of training."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.document import _doc

# Environment variable with the secret that engines require from their clients.
SECRET_VARIABLE = "POSTTRAIN_ENGINE_SECRET"


@dataclass(frozen=True)
class PrefillDecode:
    """Prefill-only engines; the others then only decode (PD disaggregation)."""

    num_prefill_engines: int = _doc("Prefill-only engines; 0: every engine does both", 0, minimum=0)
    gpus_per_prefill_engine: int = _doc("GPUs of a prefill-only engine (its world size)", 8, minimum=1)
    max_running_requests: int = _doc("Maximum concurrent requests of a prefill-only engine", 512, minimum=1)
    transfer_backend: str = _doc(
        "Library that transfers the KV cache to the decoding engines", "mooncake", choices=("mooncake", "nixl")
    )


@dataclass(frozen=True)
class Engine:
    """The inference engines."""

    kind: str = _doc(
        "sglang: a real SGLang server; embedded: our server over transformers", "sglang", choices=("sglang", "embedded")
    )
    python: str = _doc("Interpreter of the SGLang environment; empty: the workflow's own", "")
    num_engines: int = _doc("Engines per run, prefill-only engines not counted", 1, minimum=1)
    gpus_per_engine: int = _doc("GPUs of one engine (its world size)", 8, minimum=1)
    own_nodes: int = _doc(
        "Number of the job's last nodes that only engines use; trainer ranks run on the others, and "
        "neither sleeps. 0: engines share the trainer's nodes and GPUs",
        0,
        minimum=0,
    )
    dtype: str = _doc(
        "Precision of unquantised weights and activations in the engine", "bfloat16", choices=("bfloat16", "float32")
    )
    port: int = _doc("First port; 0: any free ports", 0, minimum=0, maximum=65535)
    mem_fraction_static: float = _doc(
        "Share of GPU memory for weights and KV cache", 0.7, exclusive_minimum=0, maximum=1
    )
    max_running_requests: int = _doc("Maximum concurrent requests of an engine", 512, minimum=1)
    groups_per_request: int = _doc(
        "Groups per request: an engine batches them together, and they are stored together",
        1,
        minimum=1,
    )
    sleep: str = _doc(
        "Trainer and engines take turns on their GPUs and move to host memory in between: always, never "
        "(both must fit at once), or auto: on GPUs",
        "auto",
        choices=("auto", "always", "never"),
    )
    weight_transport: str = _doc(
        "How new weights reach the engines: sharded (each trainer rank sends its parts to the engine "
        "ranks that need them), tensor (rank 0 sends everything over HTTP), disk (shared files); auto: "
        "sharded with SGLang, else tensor",
        "auto",
        choices=("auto", "sharded", "tensor", "disk"),
    )
    weight_deltas: bool = _doc(
        "Keep sent weights in host memory, and send only what changed if that is smaller (requires "
        "weight_transport=sharded and engines that do not sleep)",
        False,
    )
    weight_bucket_mib: int = _doc("Largest bucket of a weight update", 2048, minimum=1)
    start_timeout_seconds: float = _doc("Time limit for an engine's start", 1800.0, exclusive_minimum=0)
    request_timeout_seconds: float = _doc("Time limit of a request", 3600.0, exclusive_minimum=0)
    num_threads: int = _doc("CPU threads of an engine; 0: torch's choice", 0, minimum=0)
    dp_attention: bool = _doc(
        "Each GPU computes attention for its own requests, which is faster with many requests; off: GPUs "
        "share the heads of each request, which is faster with few (CUDA only)",
        True,
    )
    deepep: bool = _doc(
        "Dispatch tokens to experts with DeepEP, in engines with FP8 weights and on hardware that supports it", True
    )
    deterministic: bool = _doc(
        "SGLang on GPUs samples each response from its own seed, with batch-invariant kernels: slower, "
        "but a resumed run repeats the samples of an undisturbed one on the same hardware. Always so on "
        "CPUs",
        False,
    )
    mtp_steps: int = _doc(
        "Tokens that the MTP layer drafts per step (EAGLE); 0: no speculation. The draft is not trained, "
        "so it loses acceptance as the policy changes; what is sampled never changes",
        0,
        minimum=0,
        maximum=16,
    )
    graph_batch_size: int = _doc(
        "Largest decode batch per data-parallel rank that is captured as a CUDA graph; 0: automatic: "
        "256, or, with prefill-only engines, 8 or a rank's requests per step if that is more",
        0,
        minimum=0,
    )
    pd: PrefillDecode = field(default_factory=PrefillDecode, metadata={"doc": "Prefill apart from decode"})
