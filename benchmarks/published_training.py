"""Published training runs that `planner.timing.update_time` is held against; its rates are fitted on none of them.

Print the table from the repository's root:

    python -m benchmarks.published_training

Sources:
    prime-rl   PrimeIntellect-ai/prime-rl 559b447, benchmarks/baselines (eight GPUs, FlashAttention-3, two rows a GPU,
               "LoRA" of rank 16: the base's weights have no gradients). Seconds are `step_time`; `mfu` is counted by
               src/prime_rl/trainer/perf.py, which takes attention without a mask and, in GLM-4.5-Air, a third of its
               heads' width: a predicted share is the published one times published over predicted seconds.
    bridge     NVIDIA-NeMo/Megatron-Bridge 067f987, examples/model_verification_cards/glm5-2/card.yaml and
               src/megatron/bridge/recipes/glm/h100/glm5.py: GLM-5.2, full recomputation, no overlap of gradients.
               Predicted TFLOPS are the published ones times published over predicted seconds. The indexer and the MTP
               layer are trained there, which is not in the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.published import machine_of
from posttrain.planner.resolve import resolve
from posttrain.planner.timing.update_time import Trainer, train_causes

TOLERANCE = 0.3


@dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        name: The system and its batch.
        model: File of `config/models`.
        hardware: Of `benchmarks.published.machine_of`.
        trainer: All but model and hardware.
        num_samples: Per step.
        tokens: Of a sample.
        seconds: Published, of a step.
        figure: Published, in its unit.
        unit: "% of peak" or "TFLOPS".
        is_anchor: The figures that a forecast was asked for; others were looked at afterwards.
        missing: Why a prediction is off by more than `TOLERANCE`.
    """

    name: str
    model: str
    hardware: str
    trainer: dict[str, object]
    num_samples: int
    tokens: int
    seconds: float
    figure: float
    unit: str
    is_anchor: bool = False
    missing: str = ""


def _prime_rl(
    name: str, model: str, tokens: int, seconds: float, share: float, hardware: str = "H200", adapters: bool = True,
    anchor: bool = False, missing: str = "",
) -> Run:
    trainer = {"num_gpus": 8, "num_micro_batches": 2, "kernel": "flash_3", "trains_all": not adapters}
    return Run(f"{name}, {tokens} tokens a row, {hardware}", model, hardware, trainer, 16, tokens, seconds, share,
               "% of peak", anchor, missing)


def _bridge(name, hardware, gpus, stages, samples, tokens, seconds, tflops, context=1, anchor=False, missing="") -> Run:
    stages = tuple(stages)
    data = gpus // len(stages) // context
    trainer = {"num_gpus": gpus, "stages": stages, "context": context, "expert": 32, "kernel": "sparse",
               "num_micro_batches": -(-samples // data), "overlaps": False}
    return Run(f"{name}, {samples} x {tokens} tokens, {gpus} {hardware}", "glm5.2", hardware, trainer, samples, tokens,
               seconds, tflops, "TFLOPS", anchor, missing)


RUNS = (
    _bridge("GLM-5.2", "H100", 352, [6, *[8] * 8, 4, 4], 1024, 2048, 31.205, 54.595, anchor=True),
    _prime_rl("INTELLECT-3 (GLM-4.5-Air), adapters", "glm4.5_air", 65536, 107.47, 25.07, anchor=True),
    _prime_rl("Qwen3-30B-A3B, adapters", "qwen3_30b_a3b", 65536, 42.98, 29.17, anchor=True),
    _prime_rl("INTELLECT-3 (GLM-4.5-Air), adapters", "glm4.5_air", 16384, 15.715, 19.80),
    _prime_rl("Qwen3-30B-A3B, adapters", "qwen3_30b_a3b", 16384, 7.129, 16.99),
    _prime_rl("Qwen3-30B-A3B, adapters", "qwen3_30b_a3b", 65536, 44.86, 27.94, "H100"),
    _prime_rl("Qwen3-30B-A3B, adapters", "qwen3_30b_a3b", 16384, 7.919, 15.29, "H100"),
    _prime_rl("Qwen3-30B-A3B, all weights", "qwen3_30b_a3b", 65536, 42.891, 15.40, adapters=False),
    _prime_rl("Qwen3-30B-A3B, all weights", "qwen3_30b_a3b", 16384, 7.401, 2.82, adapters=False),
    _prime_rl("Qwen3-4B, adapters", "qwen3_4b", 65536, 31.425, 37.50),
    _prime_rl("Qwen3-4B, adapters", "qwen3_4b", 16384, 5.005, 22.78),
    _prime_rl("Qwen3-4B, all weights", "qwen3_4b", 65536, 29.889, 36.07, adapters=False),
    _bridge("GLM-5.2", "GB200", 192, [13] * 6, 1024, 4096, 64.787, 102.52),
    _bridge("GLM-5.2", "H100", 416, [6, 4, *[8] * 6, 4, 4, 4, 4, 4], 32, 2048, 4.436, 10.154, context=2),
    _bridge("GLM-5.2", "H100", 608, [5, 5] + [4] * 17, 13, 200_000, 36.603, 39.648, context=32),
)


def main() -> None:
    for run in RUNS:
        config = resolve({"model": run.model, "site": "local"}, Path("config")).config
        trainer = Trainer(config.model.architecture, machine_of(run.hardware, config.hardware), **run.trainer)
        causes = train_causes(trainer, run.num_samples, run.tokens)
        total = sum(causes.values())
        top = sorted(causes.items(), key=lambda item: -item[1])
        print(f"{run.name:70} {run.seconds:8.3f} {total:8.3f} {run.seconds/total-1:+5.0%} {run.figure*run.seconds/total:6.1f} {run.figure:6.1f}",
              ", ".join(f"{k} {v/total:.0%}" for k, v in top[:6]))


if __name__ == "__main__":
    main()
