"""Which of the two models a phase of a step needs awake: the one table of it.

The training loop refuses work outside of a phase and takes its time (`training/phases.py`); the planner budgets GPU and
host memory from the same rows, as if a model slept where it is not needed. No version puts one to sleep yet: where both
do not fit awake, `planner.problems.find_warnings` says so. Without GPUs both always lie in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Args:
        name: Its time is the metric `perf/{name}_seconds`.
        engines_awake: Engine weights and KV cache are in GPU memory.
        trainer_awake: The trainer's weights are in GPU memory.
        optimizer_awake: Gradients and optimizer state are too.
    """

    name: str
    engines_awake: bool
    trainer_awake: bool
    optimizer_awake: bool


PHASES = {
    phase.name: phase
    for phase in (
        Phase("rollout", engines_awake=True, trainer_awake=False, optimizer_awake=False),
        Phase("save", engines_awake=False, trainer_awake=True, optimizer_awake=True),
        Phase("old_logprobs", engines_awake=False, trainer_awake=True, optimizer_awake=False),
        Phase("mismatch", engines_awake=False, trainer_awake=True, optimizer_awake=False),
        Phase("train", engines_awake=False, trainer_awake=True, optimizer_awake=True),
        Phase("weight_sync", engines_awake=True, trainer_awake=True, optimizer_awake=False),
    )
}

# Phases that need awake what another one does, whose budget is theirs: an evaluation asks engines as a rollout does.
LIKE_OTHERS = {"evaluation": "rollout"}
# Between two phases, when one model has gone to sleep and the other has not woken up. No work is done and no time is
# taken in it; host memory is at its fullest.
ASLEEP = Phase("asleep", engines_awake=False, trainer_awake=False, optimizer_awake=False)
