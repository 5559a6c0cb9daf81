"""What the step-time model takes from measurements: each constant with the one place it was taken from.

Peaks of a machine stand in its file in `config/hardware`; here is what share of them is reached, and what no peak
tells. `benchmarks/published.py` holds the systems that the model is compared with; none of these sets a constant of its
own.
"""

from __future__ import annotations

# Share of a published time within which almost all predictions are (`benchmarks/published_fit.py`).
TOLERANCE = 0.30

# Share of the BF16 peak that prefilling reaches, by the training time of one system: GLM-5.1 on 28 H200 nodes with 131k
# context, 3.7 minutes for 256 samples, recomputation counted as work (`benchmarks/published.py`; a test repeats it).
# Training itself has a table, `attainable`. Of prefilling no engine's rates by shape are published, and with this share
# a public server's times come out within a tenth until requests wait.
COMPUTE_SHARE = 0.1101

# Time of one layer of one decode step that does not depend on bytes: launches and communication. From the first row of
# a public server's table, GLM-5 FP8 on eight B200: 18.31 ms per token of a single request, less the bytes it reads
# (`vllm-glm5-b200-deployment.txt`).
LAYER_SECONDS = 221e-6

# Share of the memory bandwidth that decoding reaches: 3,000 of 3,350 GB/s (deepseek-ai/FlashMLA, README, dense decoding
# on H800).
MEMORY_SHARE = 0.9

# Chance that a token which the model's own MTP layer drafts is accepted. Three drafts of GLM-5.2 give 2.99 tokens a
# step, which is 1 + a + a^2 + a^3 (SemiAnalysisAI/InferenceX#2460: coding prompts of SPEED-Bench, temperature 1).
DRAFT_ACCEPTANCE = 0.809

# What speculation gains at most of a rollout by default: what it gained of whole RL steps where it was measured, with a
# frozen draft that gave 2.53 to 2.56 tokens per step over 36 steps (marin-community/marin#9114; 1.61 per stream).
MOST_SPECULATION_GAIN = 1.42

# New weights, by how they reach the engines. From shard to shard, between CPUs: what one rank of an engine gets per
# second through a host's memory and gloo, packed, sent and written (`benchmarks/weight_sync.py`, two CPU cores);
# between GPUs: what one quantises (`benchmarks/one_gpu.py`, H200), and a share of its link, since ranks wait for each
# other's rounds (simulated in `benchmarks/weight_sync.py`). Through rank 0: JSON of all ranks' copies per second
# (measured on the same kind of machine), and how much base64 adds. Others have 58.3 s for 1,487.8 GB of GLM-5 by
# broadcast, and 8.48 s by RDMA (radixark/miles, docs/advanced/p2p-weight-transfer.md).
QUANTISED_BYTES_PER_SECOND, SHARD_LINK_SHARE = 65e9, 0.5
SHARD_BYTES_PER_SECOND, JSON_BYTES_PER_SECOND, BASE64 = 2.0e9, 0.11e9, 4 / 3

# Mean length of a response as a share of the longest: 5,698 of 8,192 tokens (NVIDIA-NeMo/RL,
# docs/about/performance-summary.md, Qwen3-235B). Depends on model and data more than anything else here.
MEAN_RESPONSE_SHARE = 0.7

# Assumed, without a source: tokens of a prompt of mathematics, and how fast a node's host updates offloaded optimizer
# state (bytes read and written).
PROMPT_TOKENS = 256
HOST_OPTIMIZER_BYTES_PER_SECOND = 200e9
