"""Measured constants of the step-time model, each with its source.

A machine's peaks are in its file in `config/hardware`; here are the attainable shares of them, and constants without a
peak. `benchmarks/published.py` has the systems for comparison; none of them has its own constant.
"""

from __future__ import annotations

# Relative error that almost all predictions of published times stay below (`benchmarks/published_fit.py`).
TOLERANCE = 0.30

# Share of the BF16 peak in prefill, from the training time of one system: GLM-5.1 on 28 H200 nodes with 131k context,
# 3.7 minutes for 256 samples, with recomputation counted as work (`benchmarks/published.py`; a test repeats it).
# Training uses the table in `attainable`. No engine's prefill rates by shape are published, and with this share a
# public server's times are predicted within a tenth until requests queue.
COMPUTE_SHARE = 0.1101

# Time of one layer of one decode step that is independent of bytes: launches and communication. From the first row of a
# public server's table, GLM-5 FP8 on eight B200: 18.31 ms per token of a single request, minus the time to read its
# bytes (`vllm-glm5-b200-deployment.txt`).
LAYER_SECONDS = 221e-6

# Share of the memory bandwidth in decoding: 3,000 of 3,350 GB/s (deepseek-ai/FlashMLA, README, dense decoding on
# H800).
MEMORY_SHARE = 0.9

# Probability that a token drafted by the model's own MTP layer is accepted. Three drafts of GLM-5.2 give 2.99 tokens
# per step, which is 1 + a + a^2 + a^3 (SemiAnalysisAI/InferenceX#2460: coding prompts of SPEED-Bench, temperature 1).
DRAFT_ACCEPTANCE = 0.809

# Default limit of a rollout's speed-up by speculation: the measured speed-up of whole RL steps with a frozen draft
# that gave 2.53 to 2.56 tokens per step over 36 steps (marin-community/marin#9114; 1.61 per stream).
MOST_SPECULATION_GAIN = 1.42

# Transfer of new weights to the engines. Sharded, between CPUs: bytes per second that one rank of an engine receives
# through host memory and gloo, including packing and writing (`benchmarks/weight_sync.py`, two CPU cores). Sharded,
# between GPUs: the quantisation rate of a GPU (`benchmarks/one_gpu.py`, H200), and a share of its link, because ranks
# wait for each other's rounds (simulated in `benchmarks/weight_sync.py`). Through rank 0: JSON bytes of all ranks'
# copies per second (measured on the same kind of machine), and base64's overhead. Published: 58.3 s for 1,487.8 GB of
# GLM-5 by broadcast, and 8.48 s by RDMA (radixark/miles, docs/advanced/p2p-weight-transfer.md).
QUANTISED_BYTES_PER_SECOND, SHARD_LINK_SHARE = 65e9, 0.5
SHARD_BYTES_PER_SECOND, JSON_BYTES_PER_SECOND, BASE64 = 2.0e9, 0.11e9, 4 / 3

# Mean response length as a share of the longest: 5,698 of 8,192 tokens (NVIDIA-NeMo/RL,
# docs/about/performance-summary.md, Qwen3-235B). Depends on model and data more than any other constant here.
MEAN_RESPONSE_SHARE = 0.7

# Assumed, without a source: tokens of a mathematics prompt, and the rate at which a node's host updates offloaded
# optimizer state (bytes read and written).
PROMPT_TOKENS = 256
HOST_OPTIMIZER_BYTES_PER_SECOND = 200e9
