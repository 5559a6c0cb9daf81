"""Published training runs that `plan.timing.update_time` is held against, with the constants of `plan.timing.fitted`.

A published figure counts operations in its own way. The predicted one counts them in the same: it is the published
figure times published over predicted seconds. Print the table from the repository's root:

    python -m benchmarks.published_training

Sources:
    prime-rl   PrimeIntellect-ai/prime-rl 559b447, benchmarks/baselines: eight GPUs, FlashAttention-3, two rows a GPU,
               full recomputation (with activations in host memory in INTELLECT-3's row of 65,536 tokens). With
               adapters of rank 16 the weights have no gradients. Seconds are `step_time`; `mfu` is counted by
               src/prime_rl/trainer/perf.py: attention without a mask, heads as wide as hidden size over heads.
    bridge     NVIDIA-NeMo/Megatron-Bridge, examples/model_verification_cards/glm5-2/card.yaml at 067f987 and 1754823,
               recipes in src/megatron/bridge/recipes/glm/h100/glm5.py: GLM-5.2, full recomputation, no overlap of
               gradients. Its MTP layer, and in pre-training the indexer, are trained, which is not predicted. The
               row in MXFP8 is a demonstration of four steps (#5401): made-up data, an even router, nothing recomputed;
               its layout is not published, taken is that of the run in BF16 on as many GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.claims import start
from benchmarks.published import machine_of

from posttrain.config.schema import Architecture, Config, Hardware
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.model_size import count_parameters, model_weights
from posttrain.plan.timing import attainable
from posttrain.plan.timing.fitted import FITTED, Fitted
from posttrain.plan.timing.update_time import Trainer, train_causes

# Pre-training of GLM-5.2 from random weights with `--deterministic` over the same from its own weights without, on 192
# GB200: the only place where the source has run both. What a router at random weights costs is in it, too.
DETERMINISTIC = 64.787 / 34.262
OF_GB200 = "deterministic kernels and a random router cost less here than on GB200, where alone the source ran both"
WIDE_EXPERTS = "experts of 1,408 lose less than those of 768, which most rows have, and so the constant for products"
OF_H100 = "what a GB200 attains of its peaks: taken are the shares measured on an H100"


@dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        name: The system and its rows.
        model: File of `config/models`.
        hardware: Of `benchmarks.published.machine_of`.
        trainer: Makes the trainer.
        num_samples: Per step.
        tokens: Of a sample.
        seconds: Of a step, published.
        figure: Published, in its unit.
        unit: "TFLOPS" per GPU, or "%" of its peak.
        slower: What the system's own settings cost that this trainer does not have.
        shards_weights: Weights are gathered for each pass (FSDP), and adapters have products of their own.
        is_fp8: Products run at the rate of FP8, twice that of BF16.
        missing: What the prediction lacks, where it is off by more than `benchmarks.published.GOOD`.
    """

    name: str
    model: str
    hardware: str
    trainer: Callable[[Architecture, Hardware], Trainer]
    num_samples: int
    tokens: int
    seconds: float
    figure: float
    unit: str
    missing: str = ""
    slower: float = 1.0
    shards_weights: bool = False
    is_fp8: bool = False


@dataclass(frozen=True)
class Forecast:
    """What the planner says of a run.

    Args:
        run: The run.
        causes: Cause -> seconds, the longest first.
    """

    run: Run
    causes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return sum(self.causes.values())

    @property
    def figure(self) -> float:
        """The run's figure, predicted."""
        return self.run.figure * self.run.seconds / self.seconds

    @property
    def error(self) -> float:
        """Predicted seconds over published, less one."""
        return self.seconds / self.run.seconds - 1


def _rows(
    model: str, hardware: str, tokens: int, seconds: float, share: float, missing: str = "", trains_all: bool = False
) -> Run:
    trainer = partial(Trainer, num_gpus=8, num_micro_batches=2, kernel="flash_3", trains_all=trains_all)
    trained = "all weights" if trains_all else "adapters"
    name = f"prime-rl, {model}, {trained}, rows of {tokens}, 8 {hardware}"
    return Run(name, model, hardware, trainer, 16, tokens, seconds, share, "%", missing, shards_weights=True)


def _glm52(
    hardware: str, stages: tuple[int, ...], context: int, data: int, samples: int, tokens: int, seconds: float,
    tflops: float, missing: str = "", slower: float = 1.0, is_demonstration: bool = False,
) -> Run:  # fmt: skip
    gpus = len(stages) * context * data
    trainer = partial(
        Trainer,
        num_gpus=gpus,
        stages=stages,
        context=context,
        expert=32,
        num_micro_batches=samples // data,
        kernel="sparse",
        is_indexer_fused=True,
        overlaps=False,
        recompute=not is_demonstration,
        imbalance=1.0 if is_demonstration else ASSUMPTIONS.expert_imbalance,
    )
    name = f"Megatron-Bridge, GLM-5.2, {samples} x {tokens} tokens, {gpus} {hardware}"
    run = Run(name, "glm5.2", hardware, trainer, samples, tokens, seconds, tflops, "TFLOPS", missing, slower)
    return dataclasses.replace(run, name=f"{name}, MXFP8", is_fp8=True) if is_demonstration else run


# The figures that the table of rates, made before, had to give; then others of the same sources.
ANCHORS = (
    _glm52("H100", (6, *[8] * 8, 4, 4), 1, 32, 1024, 2048, 31.205, 54.595, OF_GB200, DETERMINISTIC),
    _rows("glm4.5_air", "H200", 65536, 107.472, 25.072, WIDE_EXPERTS),
    _rows("qwen3_30b_a3b", "H200", 65536, 42.981, 29.169),
)
OTHERS = (
    _glm52("GB200", (13,) * 6, 1, 32, 3072, 4096, 39.43, 499.6, is_demonstration=True),
    _glm52("GB200", (13,) * 6, 1, 32, 1024, 4096, 34.262, 194.13, OF_H100),
    _glm52("H100", (6, 4, *[8] * 6, 4, 4, 4, 4, 4), 2, 16, 32, 2048, 4.436, 10.154),
    _glm52("H100", (5, 5, *[4] * 17), 32, 1, 13, 200_000, 36.603, 39.648),
    _rows("glm4.5_air", "H200", 16384, 15.715, 19.801, WIDE_EXPERTS),
    _rows("qwen3_30b_a3b", "H200", 16384, 7.129, 16.988),
    _rows("qwen3_30b_a3b", "H100", 65536, 44.858, 27.943),
    _rows("qwen3_30b_a3b", "H100", 16384, 7.919, 15.294),
    _rows("qwen3_30b_a3b", "H200", 65536, 42.891, 15.397, trains_all=True),
    _rows("qwen3_30b_a3b", "H200", 16384, 7.401, 2.822, trains_all=True),
    _rows("qwen3_4b", "H200", 65536, 31.425, 37.505),
    _rows("qwen3_4b", "H200", 65536, 29.889, 36.075, trains_all=True),
)


def quick() -> None:
    """Print the same: nothing is measured."""
    main()


def main() -> None:
    """Print every prediction beside what was published, and what it spends its time on."""
    for row in map(forecast, (*ANCHORS, *OTHERS)):
        run, most = row.run, [f"{cause} {value / row.seconds:.0%}" for cause, value in row.causes.items()][:3]
        figures = f"{run.figure:6.1f} {row.figure:6.1f} {run.unit:6} {row.error:+5.0%}"
        print(f"{run.name:70} {run.seconds:8.2f} s {row.seconds:8.2f} s {figures}  {', '.join(most)}; {run.missing}")


def forecast(run: Run, fitted: Fitted = FITTED) -> Forecast:
    """Return what the planner says of a run.

    Args:
        run: The run.
        fitted: What is lost against attainable rates.
    """
    config = _config(run.model)
    of_run = dataclasses.replace(fitted, products=fitted.products / 2) if run.is_fp8 else fitted
    trainer = run.trainer(config.model.architecture, machine_of(run.hardware, config.hardware))
    trainer = dataclasses.replace(trainer, fitted=of_run)
    causes = train_causes(trainer, run.num_samples, run.tokens)
    if run.shards_weights:
        causes["gathered weights"] = fitted.gathers * gather_seconds(trainer)
        if not trainer.trains_all:
            causes["adapters"] = fitted.kernel_bytes * adapter_seconds(trainer, run.num_samples * run.tokens)
    if run.slower > 1:
        causes["deterministic kernels, random router"] = (run.slower - 1) * sum(causes.values())
    return Forecast(run, dict(sorted(causes.items(), key=lambda item: -item[1])))


@functools.cache
def _config(model: str) -> Config:
    return resolve({"model": model, "site": "local"}, Path("config")).config


def gather_seconds(trainer: Trainer) -> float:
    """Return the time of gathering sharded weights on a link: in BF16, twice a micro-batch, and gradients once back."""
    passes = 3 if trainer.trains_all else 2
    size = 2 * count_parameters(model_weights(trainer.arch)) * (trainer.num_gpus - 1) / trainer.num_gpus
    return trainer.num_micro_batches * passes * size / attainable.link(trainer.hardware, trainer.num_gpus)


def adapter_seconds(trainer: Trainer, tokens: int) -> float:
    """Return the time in which adapters of small rank pass the memory: they are bound by it.

    Beside each matrix the input is read once more, and the output is written, read and added to, in BF16: in the
    forward pass, its repetition, and twice in the backward pass.
    """
    arch = trainer.arch
    query, key_value = (heads * arch.head_dim for heads in (arch.num_attention_heads, arch.num_key_value_heads))
    width, copies = arch.intermediate_size, 1
    if arch.n_routed_experts:
        width, copies = arch.moe_intermediate_size, arch.num_experts_per_tok + arch.n_shared_experts
    hidden = arch.hidden_size
    matrices = [(hidden, query), (hidden, key_value), (hidden, key_value), (query, hidden)]
    matrices += copies * [(hidden, width), (hidden, width), (width, hidden)]
    elements = sum(inputs + 3 * outputs for inputs, outputs in matrices)
    moved = 4 * 2 * elements * arch.num_hidden_layers * tokens / trainer.num_gpus
    return moved / attainable.memory(trainer.hardware)


if __name__ == "__main__":
    start(main, quick)
