"""GPU memory that no tracker of a trainer sees: the plan's estimate, and the range of reported values.

Neither torch's allocator nor the rehearsal tracks contexts, communicators and library buffers. Reports from other
machines vary, so a plan that is closer to the limit than this variation is neither known to fit nor known not to.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import uses_engines
from posttrain.config.schema import Config
from posttrain.plan.sizing.assumptions import ASSUMPTIONS, Assumptions


@dataclass(frozen=True)
class UntrackedMemory:
    """One term, in GiB per GPU.

    Args:
        name: Name of the term.
        gib: The plan's estimate.
        least: Lowest reported value.
        most: Highest reported value, or the estimate if that is higher.
        source: Source of the reports.
    """

    name: str
    gib: float
    least: float
    most: float
    source: str


def untracked_terms(config: Config, assumptions: Assumptions = ASSUMPTIONS) -> list[UntrackedMemory]:
    """Return the terms of a configuration; empty on machines without GPUs.

    Args:
        config: The resolved configuration.
        assumptions: The estimates.
    """
    if config.hardware.device == "cpu":
        return []
    # Trainer and engine are separate processes, each with a context if they share a GPU.
    contexts = 1 + (uses_engines(config) and not config.engine.own_nodes)
    terms = [
        (
            "CUDA contexts and loaded kernels",
            contexts * assumptions.cuda_context,
            contexts * 0.3,
            contexts * 1.0,
            "pytorch#107667: about 300 MB where kernels are loaded when they are used, above 1,000 MB where all are",
        ),
        (
            "communicators of NCCL",
            assumptions.nccl,
            0.5,
            5.6,
            "nccl#964: 544 MB for a group of two A100; nccl#1685: 3.3 GB more after an all-to-all of 8 H100; "
            "nccl#864: about 6 GB with three groups and more",
        ),
    ]
    if config.trainer.deepep and config.model.architecture.n_routed_experts:
        source = "DeepEP#434: 510 MB are asked for at hidden size 7168 and 16 ranks; DeepEP#571: 3 GB in its own tests"
        terms.append(("buffers of DeepEP", assumptions.deepep, 0.5, 2.8, source))
    return [UntrackedMemory(name, gib, least, max(gib, most), source) for name, gib, least, most, source in terms]


def uncertainty_gib(config: Config) -> float:
    """Return the uncertainty of the untracked memory; a plan with less headroom may not fit.

    Example:
        GLM-5 on H200: 4.9 GiB, 3.6 of them NCCL's.
    """
    return sum(term.most - term.gib for term in untracked_terms(config))
