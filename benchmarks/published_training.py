"""Published training runs that `plan.timing.update_time` is held against: its rates are fitted on none of them.

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
               gradients. Its MTP layer, and in pre-training the indexer, are trained, which is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.claims import start
from benchmarks.published import machine_of

from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.resolve import resolve
from posttrain.plan.timing.update_time import Trainer, train_causes

TOLERANCE = 0.3
# Pre-training of GLM-5.2 from random weights with `--deterministic` over the same from its own weights without, on 192
# GB200: the only place where the source has run both. What a router at random weights costs is in it, too.
DETERMINISTIC = 64.787 / 34.262
FEW_TOKENS = "rows of 1,024 tokens a GPU: a host that starts kernels more slowly than they run"
SHORT_ROWS = "time that is neither products nor bytes of these; no trace is published"
IN_DOUBT = "; the row's throughput times its seconds is not the tokens of its two rows a GPU"


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
        missing: What the prediction lacks, where it is off by more than `TOLERANCE`.
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
        """Predicted figure over published, less one."""
        return self.figure / self.run.figure - 1


def _rows(
    model: str, hardware: str, tokens: int, seconds: float, share: float, missing: str = "", trains_all: bool = False
) -> Run:
    trainer = partial(Trainer, num_gpus=8, num_micro_batches=2, kernel="flash_3", trains_all=trains_all)
    trained = "all weights" if trains_all else "adapters"
    name = f"prime-rl, {model}, {trained}, rows of {tokens}, 8 {hardware}"
    return Run(name, model, hardware, trainer, 16, tokens, seconds, share, "%", missing)


def _glm52(
    hardware: str, stages: tuple[int, ...], context: int, data: int, samples: int, tokens: int, seconds: float,
    tflops: float, missing: str = "", slower: float = 1.0,
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
    )
    name = f"Megatron-Bridge, GLM-5.2, {samples} x {tokens} tokens, {gpus} {hardware}"
    return Run(name, "glm5.2", hardware, trainer, samples, tokens, seconds, tflops, "TFLOPS", missing, slower)


# The figures that the table of rates, made before, had to give; then others of the same sources.
ANCHORS = (
    _glm52("H100", (6, *[8] * 8, 4, 4), 1, 32, 1024, 2048, 31.205, 54.595, slower=DETERMINISTIC),
    _rows("glm4.5_air", "H200", 65536, 107.472, 25.072),
    _rows("qwen3_30b_a3b", "H200", 65536, 42.981, 29.169),
)
OTHERS = (
    _glm52("GB200", (13,) * 6, 1, 32, 1024, 4096, 34.262, 194.13),
    _glm52("H100", (6, 4, *[8] * 6, 4, 4, 4, 4, 4), 2, 16, 32, 2048, 4.436, 10.154, FEW_TOKENS),
    _glm52("H100", (5, 5, *[4] * 17), 32, 1, 13, 200_000, 36.603, 39.648),
    _rows("glm4.5_air", "H200", 16384, 15.715, 19.801, SHORT_ROWS),
    _rows("qwen3_30b_a3b", "H200", 16384, 7.129, 16.988, SHORT_ROWS),
    _rows("qwen3_30b_a3b", "H100", 65536, 44.858, 27.943, SHORT_ROWS),
    _rows("qwen3_30b_a3b", "H100", 16384, 7.919, 15.294, SHORT_ROWS),
    _rows("qwen3_30b_a3b", "H200", 65536, 42.891, 15.397, trains_all=True),
    _rows("qwen3_30b_a3b", "H200", 16384, 7.401, 2.822, SHORT_ROWS + IN_DOUBT, trains_all=True),
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


def forecast(run: Run) -> Forecast:
    """Return what the planner says of a run."""
    config = resolve({"model": run.model, "site": "local"}, Path("config")).config
    trainer = run.trainer(config.model.architecture, machine_of(run.hardware, config.hardware))
    causes = train_causes(trainer, run.num_samples, run.tokens)
    if run.slower > 1:
        causes["deterministic kernels, random router"] = (run.slower - 1) * sum(causes.values())
    return Forecast(run, dict(sorted(causes.items(), key=lambda item: -item[1])))


if __name__ == "__main__":
    start(main, quick)
