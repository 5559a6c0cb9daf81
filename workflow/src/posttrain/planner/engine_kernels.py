"""Which kernels SGLang uses on which GPU, for the flags that the model and the weights do not decide alone.

Sources: `sglang-glm5-cookbook.txt`, section 3.2 (B200: TRT-LLM kernels for sparse attention and experts, fused
all-reduce, experts not spread; AMD: TileLang, chunks of 131,072 tokens, a watchdog of 20 minutes, no EAGLE);
`miles-glm5-recipe.txt`, section 5.3, and radixark/miles `scripts/run_glm5_744b_a40b.py` at 31f1ca961 (FlashMLA sparse
kernels on every NVIDIA GPU; on Blackwell `flashinfer_trtllm_routed` for FP8 experts and `triton` for BF16 ones, because
`flashinfer_trtllm` returned wrong values after a weight update, radixark/miles pull request 1477). SGLang 0.5.23
`srt/arg_groups/overrides.py` names the TRT-LLM kernel as its own choice to decode with a BF16 cache on Blackwell.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKernels:
    """Kernels of one GPU.

    Args:
        sparse: Sparse attention with many requests, data-parallel: (prefill, decode).
        sparse_few_requests: The same with few requests, tensor-parallel.
        moe_fp8: Experts in FP8 without DeepEP; None leaves SGLang the choice.
        moe_fp8_few_requests: The same with few requests.
        moe_bf16: Experts in BF16.
        allreduce_fusion: FlashInfer can fuse the all-reduce with what follows.
        deepep: DeepEP works in an engine.
        speculation: EAGLE works with sparse attention.
        page_tokens: Page of the KV cache; None leaves SGLang the choice.
        chunked_prefill_tokens: Prefill chunk of the whole engine; None: the recipe's, per GPU.
        watchdog_seconds: None: the recipe's.
    """

    sparse: tuple[str, str] = ("flashmla_sparse", "flashmla_sparse")
    sparse_few_requests: tuple[str, str] = ("flashmla_sparse", "flashmla_sparse")
    moe_fp8: str | None = None
    moe_fp8_few_requests: str | None = None
    moe_bf16: str | None = None
    allreduce_fusion: bool = False
    deepep: bool = True
    speculation: bool = True
    page_tokens: int | None = 64
    chunked_prefill_tokens: int | None = None
    watchdog_seconds: int | None = None


HOPPER = EngineKernels()
BLACKWELL = EngineKernels(
    sparse_few_requests=("flashmla_sparse", "trtllm"),
    moe_fp8="flashinfer_trtllm_routed",
    moe_fp8_few_requests="flashinfer_trtllm",
    moe_bf16="triton",
    allreduce_fusion=True,
)
AMD = EngineKernels(
    sparse=("tilelang", "tilelang"),
    sparse_few_requests=("tilelang", "tilelang"),
    deepep=False,
    speculation=False,
    page_tokens=None,
    chunked_prefill_tokens=131072,
    watchdog_seconds=1200,
)
KERNELS = {
    "h100": HOPPER,
    "h200": HOPPER,
    "b200": BLACKWELL,
    "gb300": BLACKWELL,
    "mi300x": AMD,
}


def kernels_of(hardware: str) -> EngineKernels:
    """Return the kernels of a machine by its name in `config/hardware`; one that is not in the table is as Hopper."""
    return KERNELS.get(hardware, HOPPER)
