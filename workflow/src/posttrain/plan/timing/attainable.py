"""Attainable shares of machines' peaks in training: each rate with the source of its measurement.

The peaks are in `config/hardware`. Shares measured on an H100 are used for every GPU, because few have been published
for others. No rate here is fitted on a training run; `fitted` has the losses of training runs against these rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from posttrain.config.schema import Hardware

# BF16 peak of the H100 (data sheet, dense), to which the rates below are relative, in TFLOPS.
_H100 = 989.5

# Well-shaped matrix products: 794.5 of 989 TFLOPS on an H100 (stas00/ml-engineering,
# compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS").
GEMM_SHARE = 794.5 / 989

# FP32 products, which run outside of the tensor cores: 67 TFLOPS (data sheet of the H100).
FP32_SHARE = 67 / _H100

# Experts' products by an expert's width. The first two are a whole forward pass of 32,768 tokens, with the permutation
# and the activation (ByteDance-Seed/VeOmni#460, torch's grouped products on an H100: 242.12 TFLOPS at 768, 180.67 at
# 512); the last is the product alone, 512 rows an expert (pytorch/ao#2490: 1.31 ms for 8192 x 5120 x 8192).
EXPERT_TFLOPS: Mapping[float, float] = {512: 180.67, 768: 242.12, 5120: 2 * 8192 * 5120 * 8192 / 1.31e-3 / 1e12}

# Attention in TFLOPS by tokens of a sequence, heads of 128, on an H100: forward causal, backward not causal (Shah et
# al., FlashAttention-3, arXiv 2407.08608, figures 5 and 6). A backward pass is counted as 2.5 forward passes there.
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ATTENTION_TFLOPS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "flash_3": ((292, 423, 521, 579, 602, 616), (316, 424, 501, 542, 559, 561)),
    "fused": ((315, 410, 484, 518, 529, 539), (305, 408, 465, 499, 518, 516)),  # cuDNN
    # A custom mask makes torch use kernels for older GPUs; no rates of these on an H100 are published, so this uses
    # those of FlashAttention-2, also made for older GPUs, without a mask.
    "masked": ((309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)),
    # Sparse attention, 64 heads: TileLang's, close to 600 TFLOPS on an H800 and about 115 on an H200
    # (tile-ai/tilelang 00a1cee, examples/deepseek_v32/README.md). No rates of cuDNN's are published.
    "sparse": ((600,) * 6, (115,) * 6),
    # Megatron Core's TileLang kernels, as this trainer calls them: `benchmarks/one_gpu.py` on an H200, 64 heads, 1,024
    # queries with 8,192 keys, measured once; fewer heads, as with TP, were not measured.
    "tilelang": ((188,) * 6, (73,) * 6),
}
ATTENTION_BACKWARD = 2.5

# Copies in a GPU's memory: 2,903 of 3,350 GB/s (aigatech/vpbenchmarking, README, eight H100).
MEMORY_SHARE = 2903 / 3350

# Between GPUs: 380 of 450 GB/s in a node (NVIDIA/nccl#1264, H100), 44 of 50 between nodes
# (PrimeIntellect-ai/prime-rl#3341, RDMA between H200).
LINK_SHARE, NETWORK_SHARE = 380 / 450, 44 / 50

# Dispatch of tokens to experts and back by number of ranks, relative to 50 GB/s between nodes: one copy per node,
# including the own one (deepseek-ai/DeepEP, docs/legacy.md, H800). In a node 153 of the links' 160 GB/s.
DISPATCH_SHARE: Mapping[float, float] = {16: 43 / 50, 32: 58 / 50, 64: 51 / 50}
DISPATCH_LINK_SHARE = 153 / 160

# Host time of a kernel launch: 5 to 25 us for a product in torch on an H100, here their geometric mean
# (jiahuanglin.xyz, all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html).
LAUNCH_SECONDS = math.sqrt(5 * 25) * 1e-6


def gemm(hardware: Hardware) -> float:
    """Return the operations per second of matrix products."""
    return GEMM_SHARE * hardware.bf16_tflops * 1e12


def fp32_gemm(hardware: Hardware) -> float:
    """Return the operations per second of matrix products in FP32."""
    return FP32_SHARE * hardware.bf16_tflops * 1e12


def experts(hardware: Hardware, width: float) -> float:
    """Return the operations per second of experts of a width; at most those of other products."""
    return min(_between(EXPERT_TFLOPS, width) / _H100, GEMM_SHARE) * hardware.bf16_tflops * 1e12


def attention(hardware: Hardware, kernel: str, tokens: float) -> tuple[float, float]:
    """Return the operations per second of attention: forward, backward.

    Args:
        hardware: The machine.
        kernel: One of `ATTENTION_TFLOPS`.
        tokens: Length of a sequence.
    """
    scale = hardware.bf16_tflops * 1e12 / _H100
    forward, backward = (
        _between(dict(zip(_LENGTHS, rates, strict=True)), tokens) for rates in ATTENTION_TFLOPS[kernel]
    )
    return forward * scale, backward * scale


def memory(hardware: Hardware) -> float:
    """Return the bytes per second of a GPU's memory, read and written together."""
    return MEMORY_SHARE * hardware.hbm_gb_per_s * 1e9


def link(hardware: Hardware, span: int) -> float:
    """Return the bytes per second that a GPU sends in a group that spans `span` ranks."""
    if span <= _linked(hardware):
        return LINK_SHARE * hardware.gpu_link_gb_per_s * 1e9
    return NETWORK_SHARE * hardware.network_gb_per_s * 1e9 / hardware.gpus_per_node


def dispatch_seconds(hardware: Hardware, ranks: int, copies: int, token_bytes: float) -> float:
    """Return the time to send one token to its experts, or back.

    Args:
        hardware: The machine.
        ranks: Number of ranks that share the experts.
        copies: Number of experts per token.
        token_bytes: Size of a token.
    """
    if ranks == 1:
        return 0.0
    if ranks <= _linked(hardware):
        return _distinct(ranks, copies) * token_bytes / (DISPATCH_LINK_SHARE * link(hardware, ranks))
    share = _between(DISPATCH_SHARE, ranks)
    network = share * hardware.network_gb_per_s * 1e9 / hardware.gpus_per_node
    return _distinct(ranks / hardware.gpus_per_node, copies) * token_bytes / network


def _linked(hardware: Hardware) -> int:
    """Return the number of GPUs connected by links, which may span several nodes."""
    return max(hardware.gpus_per_node, hardware.linked_gpus)


def _distinct(places: float, copies: int) -> float:
    """Return the expected number of distinct places that a token's copies reach, for uniformly random places."""
    return places * (1 - (1 - 1 / places) ** copies)


def _between(table: Mapping[float, float], x: float) -> float:
    """Return the value at x, interpolated linearly in log x between points and constant outside."""
    points = sorted(table)
    x = min(max(x, points[0]), points[-1])
    above = next(i for i, point in enumerate(points) if point >= x)
    low, high = points[max(above - 1, 0)], points[above]
    part = 0.0 if low == high else math.log(x / low) / math.log(high / low)
    return table[low] + part * (table[high] - table[low])
