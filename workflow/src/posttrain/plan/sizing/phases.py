"""The table of the model parts that each phase of a step needs awake.

The training loop rejects work outside of a phase and times each (`rl/training/phases.py`), trainer and engines sleep
and wake up by this table (`rl/training/colocation.py`), and the planner budgets GPU and host memory from its rows.
Without sleep (`config.derived.takes_turns`) all parts are awake in every phase.
"""

from __future__ import annotations

from dataclasses import dataclass

# Parts that sleep and wake up independently. An engine's cache includes the CUDA graphs captured over it.
ENGINE_WEIGHTS, ENGINE_CACHE, TRAINER, OPTIMIZER = "engine_weights", "engine_cache", "trainer", "optimizer"


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Args:
        name: The metric `perf/{name}_seconds` is its time.
        awake: Parts in GPU memory: an engine's weights, its KV cache, the trainer's weights, and the optimizer's state
            with the gradients.
    """

    name: str
    awake: frozenset[str]


# Between two phases, after one model has gone to sleep and before the other wakes up; host memory is at its peak.
ASLEEP = Phase("asleep", frozenset())
EVERYTHING = frozenset((ENGINE_WEIGHTS, ENGINE_CACHE, TRAINER, OPTIMIZER))
PHASES = {
    phase.name: phase
    for phase in (
        Phase("rollout", frozenset({ENGINE_WEIGHTS, ENGINE_CACHE})),
        Phase("save", frozenset()),  # the data to write is on the host
        Phase("old_logprobs", frozenset({TRAINER})),
        Phase("mismatch", frozenset({TRAINER})),
        Phase("train", frozenset({TRAINER, OPTIMIZER})),
        Phase("weight_sync", frozenset({ENGINE_WEIGHTS, TRAINER})),
    )
}

# Phases with the needs and budget of another: an evaluation uses engines like a rollout.
LIKE_OTHERS = {"evaluation": "rollout"}
