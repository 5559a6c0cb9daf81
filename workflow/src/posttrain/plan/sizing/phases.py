"""Which of the two models a phase of a step needs awake: the one table of it.

The training loop rejects work outside of a phase and times it (`rl/training/phases.py`), trainer and engines go to
sleep and wake up by it (`rl/training/colocation.py`), and the planner budgets GPU and host memory from the same rows.
Where nobody sleeps (`config.derived.takes_turns`) all is awake in every phase.
"""

from __future__ import annotations

from dataclasses import dataclass

# What sleeps and wakes up by itself. An engine's cache comes with the graphs that were captured over it.
ENGINE_WEIGHTS, ENGINE_CACHE, TRAINER, OPTIMIZER = "engine_weights", "engine_cache", "trainer", "optimizer"


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Args:
        name: Its time is the metric `perf/{name}_seconds`.
        awake: What lies in GPU memory: of an engine its weights, and its KV cache; of the trainer its weights, and the
            optimizer's state with the gradients.
    """

    name: str
    awake: frozenset[str]


# Between two phases, when one model has gone to sleep and the other has not woken up; host memory is at its fullest.
ASLEEP = Phase("asleep", frozenset())
EVERYTHING = frozenset((ENGINE_WEIGHTS, ENGINE_CACHE, TRAINER, OPTIMIZER))
PHASES = {
    phase.name: phase
    for phase in (
        Phase("rollout", frozenset({ENGINE_WEIGHTS, ENGINE_CACHE})),
        Phase("save", frozenset()),  # what is written lies on the host
        Phase("old_logprobs", frozenset({TRAINER})),
        Phase("mismatch", frozenset({TRAINER})),
        Phase("train", frozenset({TRAINER, OPTIMIZER})),
        Phase("weight_sync", frozenset({ENGINE_WEIGHTS, TRAINER})),
    )
}

# Phases that need awake what another one does, whose budget is theirs: an evaluation asks engines as a rollout does.
LIKE_OTHERS = {"evaluation": "rollout"}
