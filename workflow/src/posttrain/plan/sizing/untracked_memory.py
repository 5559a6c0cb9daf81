"""GPU memory that no tracker of a trainer sees: how much the plan counts for it, and how much it has been seen to be.

Neither torch's allocator nor the rehearsal knows of contexts, communicators and buffers of libraries. What they took on
others' machines differs, so a plan that ends closer to the limit than they differ says neither that it fits nor that it
does not.
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
        name: What it is.
        gib: What the plan counts.
        least: That has been reported.
        most: That has been reported, or what is counted where that is more.
        source: Who reported it.
    """

    name: str
    gib: float
    least: float
    most: float
    source: str


def untracked_terms(config: Config, assumptions: Assumptions = ASSUMPTIONS) -> list[UntrackedMemory]:
    """Return the terms of a configuration; none on machines without GPUs.

    Args:
        config: The resolved configuration.
        assumptions: What is counted.
    """
    if config.hardware.device == "cpu":
        return []
    # Trainer and engine are processes of their own, each with a context where they share a GPU.
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
    """Return the uncertainty of the untracked memory; with less headroom a plan may not fit.

    Example:
        GLM-5 on H200: 4.9 GiB, 3.6 of them NCCL's.
    """
    return sum(term.most - term.gib for term in untracked_terms(config))
