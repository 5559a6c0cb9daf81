"""How long a restart takes after a failure, part by part.

What moves bytes follows from the plan's sizes and bandwidths. The rest is measured, each constant with where; the time
in a queue is a guess that `plan.json` repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.schema import Config
from posttrain.planner.duration import Bandwidths
from posttrain.planner.goodput import RestartSeconds
from posttrain.planner.guesses import GUESSES
from posttrain.planner.storage import Storage

# From the kill of a trainer rank to the start of the next attempt's processes: noticing it, ending engines and ranks.
# Measured with the tiny model on two CPU cores; a process that does not end is given 10 s.
END_SECONDS = 1.3
# A server from its start until it answers, where the node has its kernels and weights in memory and on disk, and where
# it has not, the reading of weights left out: SGLang 0.5.10 with a model of 122B in FP8 on B200, 88 s, and 695 s less
# 531 s (fergusfinn.com/blog/fast-sglang-starts). Trainer ranks start at the same time.
WARM_ENGINE_SECONDS, COLD_ENGINE_SECONDS = 88.0, 695.0 - 531.0
# A checkpoint is read to compare its hashes, then to load it: the second time from the nodes' memory, where this share
# of it holds what the ranks of a node read. The rest is for the processes.
FREE_MEMORY_SHARE = 0.25
# Places in `restart_parts`.
WEIGHTS, STATE = 2, 4


@dataclass(frozen=True)
class RestartPart:
    """One part of a restart.

    Args:
        part: What happens.
        seconds: How long it takes in each kind of restart.
        note: Where the figure comes from.
    """

    part: str
    seconds: RestartSeconds
    note: str


def restart_parts(
    config: Config, needed: Storage, rates: Bandwidths, durations: Mapping[str, float]
) -> list[RestartPart]:
    """Return what a restart consists of, in the order of time.

    Args:
        config: The resolved configuration.
        needed: Bytes on disk.
        rates: What is assumed of lines and disks.
        durations: `duration.durations_seconds`.
    """
    engine_bytes = needed.rollout_fp8 or needed.hf
    is_shared = config.stage.copy == "nothing"
    weights = config.nodes * engine_bytes / rates.shared_storage if is_shared else engine_bytes / rates.node_disk
    reads = checkpoint_reads(config, needed)
    state = reads * needed.training_checkpoint / rates.shared_storage
    lost = config.launch.node_silence_seconds
    return [
        RestartPart(
            "notice it, end what still runs",
            RestartSeconds(END_SECONDS, lost, lost),
            "a crash: measured on CPU; a lost node: the longest silence that is allowed",
        ),
        RestartPart("wait in the queue", RestartSeconds(0, 0, GUESSES.queue_seconds), "a guess, the site's own"),
        RestartPart(
            "read or copy the engines' weights on each node",
            RestartSeconds(weights, weights, weights),
            f"{engine_bytes / 1e9:,.0f} GB at the assumed rate of {'shared storage' if is_shared else 'a node disk'}",
        ),
        RestartPart(
            "start engines and ranks",
            RestartSeconds(WARM_ENGINE_SECONDS, COLD_ENGINE_SECONDS, COLD_ENGINE_SECONDS),
            "published for SGLang: warm, and on a fresh node",
        ),
        RestartPart(
            "check and load the training state",
            RestartSeconds(state, state, state),
            f"{needed.training_checkpoint / 1e12:.3g} TB, read {'once' if reads == 1 else 'twice'}, at the assumed "
            "rate of shared storage",
        ),
        RestartPart("weights to the engines", _always(durations["step_weight_sync"]), "as in a step"),
    ]


def checkpoint_reads(config: Config, needed: Storage) -> int:
    """Return how often a restart on the same layout reads the training state from shared storage: once or twice."""
    memory = config.site.host_memory_gib or config.hardware.host_memory_gib
    return 1 if needed.training_checkpoint / config.nodes <= FREE_MEMORY_SHARE * memory * 2**30 else 2


def total(parts: Sequence[RestartPart]) -> RestartSeconds:
    """Return the sum of the parts."""
    kinds = ("in_place", "on_spare", "requeued")
    return RestartSeconds(*(sum(getattr(part.seconds, kind) for part in parts) for kind in kinds))


def _always(seconds: float) -> RestartSeconds:
    return RestartSeconds(seconds, seconds, seconds)
