"""Published systems that the step-time model is held against, and how far it is off.

One system's training time sets `rates.COMPUTE_SHARE`, the rate of prefilling (`FittedSystem`). The constants of
`plan.timing.fitted` are fitted on these rows and those of `benchmarks/published_training.py` together
(`benchmarks/published_fit.py`). What is more than 15 % off names what is missing: nobody should trust a number of the
plan more than it deserves.
Runs that only train stand in `benchmarks/published_training.py`. Print the table from the repository's root:

    python -m benchmarks.published

Left out, because what they depend on is not published: verl's 1,700 s for DeepSeek-V3 on 96 H20 and miles' 4.5 minutes
for GLM-5.2 on 64 GB300 (no lengths), and systems of another architecture.

Sources:
    prime-rl   PrimeIntellect-ai/prime-rl v0.6.0, announcement of June 2026 (28 H200 nodes, GLM-5.1, 131k context, 256
               samples, trainer 3.7 and rollout 5.0 minutes, medians). Its published configuration,
               examples/glm5_llmd/rl.toml, has 16 nodes that train (context parallelism, full activation checkpointing)
               and 2,048 rollouts in flight with FP8 weights. Not published are the split of the 28 nodes and the mean
               length of a sample: taken are 16 and 12 nodes, and 31,599 tokens, which NVIDIA-NeMo/RL reports for the
               same kind of task at the same context. Twice the length would double COMPUTE_SHARE.
    nemo-rl    NVIDIA-NeMo/RL docs/about/performance-summary.md, version 0.6: GRPO on-policy, BF16, 512 or 2,048
               samples per step; layouts from examples/configs/recipes/llm/performance.
    vllm       `vllm-glm5-b200-deployment.txt`: GLM-5 FP8 on eight B200, 2,048 tokens in, 512 out, time per token.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims import start

from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.model_size import count_parameters, model_weights
from posttrain.plan.timing.decoding import DecodingGpus, decode_step_seconds, prefill_seconds
from posttrain.plan.timing.fitted import FITTED, Fitted
from posttrain.plan.timing.rollout_of_step import (
    Workload,
    rollout_of,
)
from posttrain.plan.timing.serving_load import published_rows
from posttrain.plan.timing.step_time import (
    logprob_seconds,
    train_seconds,
)
from posttrain.plan.timing.update_time import Trainer

PRIME_RL, NEMO_RL, VLLM = "prime-rl v0.6.0", "NVIDIA-NeMo/RL", "vLLM on 8 B200"
TOOLS = "tools, and the prefill of what they return: a rollout of this task decodes two fifths of its time"
OF_H100 = "what a GB200 attains of its peaks: taken are the shares measured on an H100; why 128 took longer than 64"
UNPUBLISHED = "layout and lengths are not published: taken is one row of equal samples, and nothing beside products"
# A prediction that is off by more names what the model lacks.
GOOD = 0.15
QUEUE = "waiting for a place: more requests than its KV cache holds"


@dataclass(frozen=True)
class FittedSystem:
    """The system whose training time sets a constant.

    Args:
        train_seconds: Of a step.
        rollout_seconds: Of a step.
        num_samples: Per step.
        mean_tokens: Of a sample; assumed.
        train_gpus: That train.
        rollout_gpus: That decode.
        in_flight: Rollouts at a time.
    """

    train_seconds: float = 3.7 * 60
    rollout_seconds: float = 5.0 * 60
    num_samples: int = 256
    mean_tokens: float = 31_599.0
    train_gpus: int = 16 * 8
    rollout_gpus: int = 12 * 8
    in_flight: int = 2048


@dataclass(frozen=True)
class Published:
    """A published time and what the model says.

    Args:
        name: The system.
        source: Where it is published.
        published_seconds: Time of a step, or per token.
        predicted_seconds: The same from the model.
        missing: What the model lacks, where it is more than `GOOD` off.
    """

    name: str
    source: str
    published_seconds: float
    predicted_seconds: float
    missing: str = ""

    @property
    def error(self) -> float:
        """Prediction over publication, less one."""
        return self.predicted_seconds / self.published_seconds - 1


@dataclass(frozen=True)
class _Step:
    """A row of NVIDIA-NeMo/RL's table."""

    model: str
    hardware: str
    num_gpus: int
    engine_gpus: int
    num_samples: int
    longest: int
    mean: int
    num_stages: int
    data_parallel: int
    seconds: float
    missing: str = ""


_DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_nextn_predict_layers=1,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
)
_QWEN3_30B = Architecture(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    intermediate_size=6144,
    moe_intermediate_size=768,
    n_routed_experts=128,
    num_experts_per_tok=8,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
)
# Dimensions of huggingface.co/deepseek-ai/DeepSeek-V3, zai-org/GLM-5, Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
MODELS = {
    "DeepSeek-V3": _DEEPSEEK_V3,
    "GLM-5": dataclasses.replace(
        _DEEPSEEK_V3,
        model_type="glm_moe_dsa",
        vocab_size=154880,
        hidden_size=6144,
        num_hidden_layers=78,
        intermediate_size=12288,
        num_attention_heads=64,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
    ),
    "Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen3-235B-A22B": dataclasses.replace(
        _QWEN3_30B,
        hidden_size=4096,
        num_hidden_layers=94,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_attention_heads=64,
    ),
}
# BF16 peak and memory bandwidth: NVIDIA's data sheets, dense; GB200 NVL72 has 180 PFLOPS and 576 TB/s for 72.
_PEAKS = {"H100": (989.5, 3350.0), "GB200": (2500.0, 8000.0), "B200": (2250.0, 8000.0), "H200": (989.5, 4800.0)}
# NVLink of a GPU in one direction in GB/s, and the GPUs that it joins beyond a node (the same data sheets).
_LINKS = {"H100": (450.0, 0), "GB200": (900.0, 72), "B200": (900.0, 0), "H200": (450.0, 0)}
# Weights of DeepSeek-V3 in BF16 by 64 GPUs to engines of 64: 47.2 s with NeMo-RL 0.3 (NVIDIA-NeMo/RL,
# docs/blogs, "nemo-rl-refit-performance", table 1); other models by their bytes.
REFIT_SECONDS_PER_PARAMETER = 47.2 / 671e9
_STEPS = (
    _Step("Qwen3-235B-A22B", "H100", 128, 16, 512, 8192, 5698, 8, 4, 395.0),
    _Step("Qwen3-235B-A22B", "H100", 256, 16, 512, 8192, 5713, 8, 8, 312.0),
    _Step("Qwen3-235B-A22B", "GB200", 64, 8, 512, 8192, 5709, 4, 4, 286.0),
    _Step("Qwen3-235B-A22B", "GB200", 128, 8, 512, 8192, 5693, 4, 8, 345.0, OF_H100),
    _Step("Qwen3-30B-A3B", "H100", 32, 2, 2048, 4096, 3203, 1, 32, 192.0),
    _Step("Qwen3-30B-A3B", "GB200", 16, 1, 2048, 4096, 3199, 1, 16, 221.0, OF_H100),
    _Step("DeepSeek-V3", "H100", 256, 32, 512, 1536, 701, 16, 16, 134.0),
    _Step("DeepSeek-V3", "H100", 512, 32, 512, 1536, 697, 16, 32, 111.0),
    _Step("DeepSeek-V3", "GB200", 128, 32, 512, 1536, 711, 8, 16, 108.0),
    _Step("DeepSeek-V3", "GB200", 256, 32, 512, 1536, 700, 8, 32, 98.7),
)
# Requests at a time -> milliseconds per output token.
# The first row sets the time of a layer, and the last two wait for room.
_VLLM_TOKENS = {row.concurrency: row.tpot_ms for row in published_rows() if 1 < row.concurrency <= 256}
_VLLM_PROMPT, _VLLM_RESPONSE = 2048, 512


def quick() -> None:
    """Print the same: nothing is measured."""
    main()


def main() -> None:
    """Print every prediction beside what was published."""
    machine = resolve({"model": "glm5", "site": "local"}, Path("config")).config.hardware
    print(f"{'system':70} {'published s':>12} {'predicted s':>12} {'off by':>7}  what the model lacks")
    for row in step_time_accuracy(machine):
        times = f"{row.published_seconds:12.4g} {row.predicted_seconds:12.4g}"
        print(f"{row.name:70} {times} {row.error:7.0%}  {row.missing}")


def step_time_accuracy(machine: Hardware, fitted: Fitted = FITTED) -> list[Published]:
    """Return every prediction beside what was published.

    Args:
        machine: Any machine with GPUs; only peaks and links are replaced.
        fitted: What is lost against attainable rates.
    """
    rows = _fitted(FittedSystem(), machine_of("H200", machine), fitted)
    rows += [_grpo_step(step, machine_of(step.hardware, machine), fitted) for step in _STEPS]
    return rows + [_token(machine_of("B200", machine), requests) for requests in _VLLM_TOKENS]


def machine_of(name: str, machine: Hardware) -> Hardware:
    """Return a machine with the peaks of a published one."""
    (tflops, bandwidth), (link, linked) = _PEAKS[name], _LINKS[name]
    return dataclasses.replace(
        machine,
        name=name.lower(),
        bf16_tflops=tflops,
        hbm_gb_per_s=bandwidth,
        gpu_link_gb_per_s=link,
        linked_gpus=linked,
    )


def _fitted(system: FittedSystem, hardware: Hardware, fitted: Fitted) -> list[Published]:
    arch = MODELS["GLM-5"]
    work = Workload(system.num_samples, 0.0, system.mean_tokens, 1.0)
    trainer = Trainer(
        arch, hardware, system.train_gpus, kernel="sparse", is_indexer_fused=True, num_micro_batches=2, fitted=fitted
    )
    training = train_seconds(trainer, work)
    engine = DecodingGpus(arch, hardware, system.rollout_gpus, "fp8", dp_attention=True)
    # Rollouts follow each other without a pause: half of a sample is the mean context.
    step = decode_step_seconds(engine, system.in_flight, system.mean_tokens / 2)
    decoding = system.num_samples * system.mean_tokens * step / system.in_flight
    name = "GLM-5.1, 131k context, 28 H200 nodes"
    return [
        Published(f"{name}: training", PRIME_RL, system.train_seconds, training, UNPUBLISHED),
        Published(f"{name}: rollout", PRIME_RL, system.rollout_seconds, decoding, TOOLS),
    ]


def _grpo_step(step: _Step, hardware: Hardware, fitted: Fitted) -> Published:
    arch = MODELS[step.model]
    # The table has lengths of prompt and response together, and no prompt's alone.
    work = Workload(step.num_samples, 0.0, step.longest, step.mean / step.longest)
    engine = DecodingGpus(arch, hardware, step.engine_gpus, "bf16", dp_attention=False)
    micro_batches = step.num_samples // step.data_parallel
    # Tensor and expert parallelism are what is left of a node, and of a stage.
    ranks = step.num_gpus // step.num_stages
    trainer = Trainer(
        arch,
        hardware,
        step.num_gpus,
        _stages(arch, step.num_stages),
        tensor=ranks // step.data_parallel,
        expert=math.gcd(arch.n_routed_experts, ranks),
        num_micro_batches=micro_batches,
        fitted=fitted,
    )
    predicted = (
        rollout_of(engine, step.num_gpus / step.engine_gpus, work).seconds
        + train_seconds(trainer, work)
        + logprob_seconds(trainer, work)
        + REFIT_SECONDS_PER_PARAMETER * count_parameters(model_weights(arch))
        + fitted.switch_seconds
    )
    name = f"{step.model}, {step.num_gpus} {step.hardware}"
    return Published(name, NEMO_RL, step.seconds, predicted, step.missing)


def _stages(arch: Architecture, count: int) -> tuple[int, ...]:
    """Return the layers of stages that are as even as they can be."""
    fewest, more = divmod(arch.num_hidden_layers, count)
    return (fewest + 1,) * more + (fewest,) * (count - more)


def _token(hardware: Hardware, requests: int) -> Published:
    engine = DecodingGpus(MODELS["GLM-5"], hardware, 8, "fp8", dp_attention=False)
    # While others decode, the next prompts are prefilled: one for each response that ends.
    prefill = prefill_seconds(engine, requests / _VLLM_RESPONSE, _VLLM_PROMPT)
    step = decode_step_seconds(engine, requests, _VLLM_PROMPT + _VLLM_RESPONSE / 2)
    missing = QUEUE if requests > 128 else ""
    name = f"GLM-5 FP8, {requests} requests, one token"
    return Published(name, VLLM, _VLLM_TOKENS[requests] / 1e3, prefill + step, missing)


if __name__ == "__main__":
    start(main, quick)
