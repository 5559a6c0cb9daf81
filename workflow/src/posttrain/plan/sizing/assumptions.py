"""All figures that the plan assumes because they were not measured for this trainer.

`plan.json` repeats them under "assumptions".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Unmeasured figures, in GiB per GPU unless stated otherwise.

    Args:
        cuda_context: CUDA context and loaded kernels of one process; for this and the next two see `untracked_memory`.
        nccl: Buffers of the communicators: TP, PP, CP, EP, data parallel and the world.
        deepep: DeepEP's send and receive buffers, if the trainer uses it.
        engine_work: Activations, CUDA graphs and communicators of an engine, beyond its static share.
        cpu_process: Interpreter and libraries of a trainer rank on a CPU machine.
        fragmentation: Share of the memory allocated and freed in a step that the allocator cannot reuse.
        headroom: Share of a GPU's memory that a preferred layout leaves free.
        expert_imbalance: Rows at the busiest rank's experts over the mean, in the worst layer and micro-batch.
        prompt_share: Longest prompt over longest response.
        queue_seconds: Queue time of a job requeued for new nodes, or waiting for a spare one.
    """

    cuda_context: float = 1.5
    nccl: float = 2.0
    deepep: float = 1.5
    engine_work: float = 6.0
    cpu_process: float = 0.4
    fragmentation: float = 0.1
    headroom: float = 0.03
    expert_imbalance: float = 1.5
    prompt_share: float = 0.25
    queue_seconds: float = 1800.0


ASSUMPTIONS = Assumptions()
