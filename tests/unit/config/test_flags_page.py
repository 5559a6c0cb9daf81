"""The tables of every flag in `docs/coming-from.md` against the flags of the published recipes and against our keys."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from posttrain.config.request import WORKFLOW_KEYS
from posttrain.config.schema import Config

_TEXT = (Path(__file__).resolve().parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
PAGE = _TEXT.partition("## Every flag\n")[2]
# Every flag and variable of radixark/miles at 31f1ca961, scripts/run_glm5_744b_a40b.py, and THUDM/slime at 624b824a8,
# scripts/run-glm5-744B-A40B.sh; those of the model's file without the families that the page names by a pattern.
RECIPE = """
--hf-checkpoint --ref-load --load --save --save-interval --prompt-data --input-key --label-key --apply-chat-template
--rollout-shuffle --rm-type --num-rollout --rollout-batch-size --n-samples-per-prompt --rollout-max-response-len
--rollout-temperature --global-batch-size --eval-interval --eval-top-p --tensor-model-parallel-size --sequence-parallel
--decoder-last-pipeline-num-layers --recompute-granularity --recompute-method --recompute-num-layers
--use-dynamic-batch-size --max-tokens-per-gpu --data-pad-size-multiplier --log-probs-chunk-size --advantage-estimator
--kl-loss-coef --kl-loss-type --kl-coef --entropy-coef --eps-clip --eps-clip-high --optimizer --lr --lr-decay-style
--weight-decay --adam-beta1 --adam-beta2 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
--use-precision-aware-optimizer --rollout-num-gpus-per-engine --sglang-mem-fraction-static --sglang-enable-dp-attention
--sglang-ep-size --sglang-dp-size --sglang-moe-dense-tp-size --sglang-enable-dp-lm-head --sglang-nsa-decode-backend
--sglang-nsa-prefill-backend --sglang-kv-cache-dtype --sglang-attention-backend --sglang-page-size
--sglang-cuda-graph-max-bs --sglang-max-running-requests --sglang-chunked-prefill-size --sglang-watchdog-timeout
--prefill-num-servers --sglang-moe-a2a-backend --sglang-deepep-mode --sglang-speculative-algorithm
--sglang-speculative-num-steps --sglang-speculative-eagle-topk --sglang-speculative-num-draft-tokens
--sglang-moe-runner-backend --attention-dropout --hidden-dropout --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend --allgather-cp --update-weight-buffer-size --actor-num-nodes
--actor-num-gpus-per-node --num-gpus-per-node --colocate --rematerialize-param-from-master-weight --moe-enable-deepep
--moe-token-dispatcher-type --use-wandb --wandb-project --wandb-group --wandb-key --disable-wandb-random-suffix
SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_NSA_FORCE_MLA INDEXER_ROPE_NEOX_STYLE NVSHMEM_DISABLE_NCCL
CUDA_DEVICE_MAX_CONNECTIONS NCCL_NVLS_ENABLE MASTER_ADDR no_proxy PYTHONPATH GLOO_SOCKET_IFNAME
--spec --enable-experimental --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-experts
--moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-layer-freq --moe-grouped-gemm --moe-permute-fusion
--moe-router-pre-softmax --moe-aux-loss-coeff --disable-bias-linear --swiglu --untie-embeddings-and-output-weights
--position-embedding-type --no-position-embedding --normalization --qk-layernorm --multi-latent-attention
--q-lora-rank --kv-lora-rank --qk-head-dim --v-head-dim --kv-channels --qk-pos-emb-head-dim --vocab-size
--make-vocab-size-divisible-by --rotary-base
--mode --run-id --model-name --model-org --megatron-model-type --num-nodes --hardware --fp8-rollout --use-deepep
--megatron-use-deepep --enable-eval --enable-mtp --enable-pd --enable-optimizer-offload --extra-args --data-dir
--model-dir --model-local-dir --output-dir --megatron-path --extra-env-vars --cuda-core-dump
"""


def keys_of(section: type, prefix: str = "") -> set[str]:
    """Return the dotted keys of a section, and the sections themselves."""
    found = set()
    for field in dataclasses.fields(section):
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.add(f"{prefix}{field.name}")
        if dataclasses.is_dataclass(default):
            found |= keys_of(type(default), f"{prefix}{field.name}.")
    return found


def test_every_flag_of_the_recipes_has_a_row():
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"--[a-z0-9-]+|\b[A-Z][A-Z0-9_]+\b|no_proxy", rows))
    assert not set(RECIPE.split()) - named


def test_every_key_of_ours_exists():
    known = keys_of(Config) | set(WORKFLOW_KEYS)
    cells = [line.split("|")[-2] for line in PAGE.splitlines() if line.startswith("| `")]
    keys = [key.partition("=")[0].removesuffix(".*") for cell in cells for key in re.findall("`([^`]+)`", cell)]
    dotted = [key for key in keys if "." in key]
    assert len(dotted) > 50, "the column of our keys is the last one"
    assert not set(dotted) - known
