"""Quality against speed: which precision of a trained model to deploy.

    cost = memory of its engine (GiB) x seconds / tokens

Choose the cheapest precision whose loss of score and divergence from the original are within bounds. The original is a
candidate, too. Losses are paired by prompt, because all precisions answer the same prompts (`intervals.paired_change`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.config.deployment import Deployment
from posttrain.readable import HOUR
from posttrain.report.intervals import paired_change
from posttrain_serving.precision.divergence import Divergence

# Task -> (prompt id, passes) of each response.
Graded = Mapping[str, Sequence[tuple[int, bool]]]


@dataclass(frozen=True)
class Measured:
    """Measurements of one precision.

    Args:
        precision: `config.deployment.ORIGINAL`, or the format.
        pass_rate: Fraction of responses that pass.
        loss_points: Decrease of the pass rate against the original, in points.
        loss_points_at_most: Upper end of its 95 % interval.
        divergence: From the original's weights, over the whole vocabulary in FP32; None for the original.
        engine_divergence: From the original's engines, over their likeliest tokens: includes weights and kernels.
        engine: Kind of the engines.
        engine_gib: Memory of its engine on all of its GPUs; on a CPU, the weights' size.
        tokens_per_second: Throughput of the engine.
    """

    precision: str
    pass_rate: float
    loss_points: float
    loss_points_at_most: float
    divergence: Divergence | None
    engine_divergence: Divergence | None
    engine: str
    engine_gib: float
    tokens_per_second: float

    @property
    def gib_hours_per_million_tokens(self) -> float:
        """Return the memory cost of a million tokens."""
        return self.engine_gib * 1e6 / self.tokens_per_second / HOUR

    def why_not(self, bounds: Deployment) -> str:
        """Return the bound that rules out this precision; empty if none does."""
        if self.divergence is None:
            return ""
        if self.divergence.mean >= bounds.max_kl:
            return f"KL {self.divergence.mean:.4f} nats, allowed is less than {bounds.max_kl:g}"
        if self.loss_points_at_most >= bounds.max_loss_points:
            lost = f"loses {self.loss_points:.1f} points, and up to {self.loss_points_at_most:.1f} (95 %)"
            return f"{lost}, allowed are less than {bounds.max_loss_points:g}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the cost."""
        return asdict(self) | {"gib_hours_per_million_tokens": self.gib_hours_per_million_tokens}


def lost_points(original: Graded, other: Graded) -> tuple[float, float]:
    """Return the decrease of the pass rate in points, and the upper end of its 95 % interval.

    Each prompt has the same weight, whatever its task.

    Args:
        original: Task -> samples of the original.
        other: Task -> samples of the other precision.
    """
    before, after = _rates(original), _rates(other)
    if before.keys() != after.keys():
        raise ValueError(f"{len(before)} and {len(after)} prompts: not the same ones")
    step = len(before) / sum(map(len, original.values()))
    loss, _, at_most = paired_change([before[prompt] - after[prompt] for prompt in before], step)
    return 100 * loss, 100 * at_most


def verdict(measured: Sequence[Measured], bounds: Deployment) -> tuple[str, str]:
    """Return the precision to deploy, and a sentence with the numbers."""
    costs = {one.precision: one.gib_hours_per_million_tokens for one in measured}
    refused = {one.precision: why for one in measured if (why := one.why_not(bounds))}
    best = min((one for one in measured if one.precision not in refused), key=lambda one: costs[one.precision])
    said = f"deploy {best.precision}: {costs[best.precision]:.3g} GiB-hours per million tokens"
    others = []
    for one in measured:
        if one is not best:
            why = refused.get(one.precision, "")
            others.append(f"{one.precision} {costs[one.precision]:.3g}{f' but {why}' if why else ''}")
    return best.precision, f"{said} ({'; '.join(others)})" if others else said


def table_of(measured: Sequence[Measured]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table's head and rows."""
    head: tuple[str, ...] = (
        *("precision", "pass rate", "points lost", "at most (95 %)", "KL, mean", "KL, 99 %", "same token"),
        *("engines' KL, mean", "same token", "engine", "GiB", "tokens/s", "GiB-h per 1M tokens"),
    )
    rows: list[tuple[str, ...]] = []
    for one in measured:
        far, told = one.divergence, one.engine_divergence
        kl = (f"{far.mean:.5f}", f"{far.p99:.4f}", f"{far.same_first:.1%}") if far else ("", "", "")
        engines = (f"{told.mean:.5f}", f"{told.same_first:.1%}", one.engine) if told else ("", "", one.engine)
        points = (f"{one.loss_points:.2f}", f"{one.loss_points_at_most:.2f}") if far else ("", "")
        speed = (f"{one.engine_gib:.4g}", f"{one.tokens_per_second:,.0f}", f"{one.gib_hours_per_million_tokens:.4g}")
        rows.append((one.precision, f"{one.pass_rate:.1%}", *points, *kl, *engines, *speed))
    return head, rows


def _rates(exams: Graded) -> Mapping[tuple[str, int], float]:
    """Return each prompt's fraction of passing samples."""
    passed: dict[tuple[str, int], list[bool]] = {}
    for name, responses in exams.items():
        for prompt_id, passes in responses:
            passed.setdefault((name, prompt_id), []).append(passes)
    return {prompt: sum(each) / len(each) for prompt, each in passed.items()}
