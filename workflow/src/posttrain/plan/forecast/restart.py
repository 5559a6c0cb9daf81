"""Duration of a restart after a failure, part by part.

Transfer times follow from the plan's sizes and bandwidths. The others are measured, with the source at each constant;
the queue time is a guess, which `plan.json` repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.derived import engine_nodes, trainer_nodes
from posttrain.config.schema import Config
from posttrain.plan.forecast.goodput import RestartSeconds
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.node_copy import rollout_bytes
from posttrain.plan.sizing.storage import Storage
from posttrain.plan.timing.duration import Bandwidths

# From the kill of a trainer rank to the start of the next attempt's processes: detection, and end of engines and
# ranks. Measured with the tiny model on two CPU cores; a process gets 10 s to end.
END_SECONDS = 1.3
# Start of a server until it answers: with kernels and weights in the node's memory and on disk, and without them,
# excluding the read of weights. SGLang 0.5.10 with a model of 122B in FP8 on B200, 88 s, and 695 s less 531 s
# (fergusfinn.com/blog/fast-sglang-starts). Trainer ranks start at the same time.
WARM_ENGINE_SECONDS, COLD_ENGINE_SECONDS = 88.0, 695.0 - 531.0
# A checkpoint is read once for its hashes and once to load it: the second read is from the nodes' page cache, if this
# share of memory holds the part that a node's ranks read. The rest is for the processes.
FREE_MEMORY_SHARE = 0.25
KINDS = tuple(field.name for field in dataclasses.fields(RestartSeconds))


@dataclass(frozen=True)
class RestartPart:
    """One part of a restart.

    Args:
        part: The activity.
        seconds: Duration in each kind of restart.
        note: Source of the figure.
    """

    part: str
    seconds: RestartSeconds
    note: str


@dataclass(frozen=True)
class Means:
    """Features that shorten a restart.

    Args:
        reads_weights: Engines read or copy their weights before they start.
        starts_engines: Engines must be started.
        state_reads: Number of reads of the training state from shared storage.
        state_waits: The training state is read after engines are ready, instead of during their start.
    """

    reads_weights: bool
    starts_engines: bool
    state_reads: int
    state_waits: bool


def means_today(config: Config, needed: Storage) -> Means:
    """Return the features of a configuration today."""
    return Means(
        reads_weights=False,
        starts_engines=True,
        state_reads=checkpoint_reads(config, needed),
        state_waits=False,
    )


def restart_parts(
    config: Config, needed: Storage, rates: Bandwidths, durations: Mapping[str, float], means: Means
) -> list[RestartPart]:
    """Return the phases of a restart, in order.

    Args:
        config: The resolved configuration.
        needed: Bytes on disk.
        rates: Assumed bandwidths of networks and disks.
        durations: `duration.durations_seconds`.
        means: Features in use.
    """
    lost = config.launch.node_silence_seconds
    start = RestartSeconds(WARM_ENGINE_SECONDS, COLD_ENGINE_SECONDS, COLD_ENGINE_SECONDS)
    start = start if means.starts_engines else _always(0.0)
    return [
        RestartPart(
            "notice it, end what still runs",
            RestartSeconds(END_SECONDS, lost, lost),
            "a crash: measured on CPU; a lost node: the longest silence that is allowed",
        ),
        RestartPart("wait in the queue", RestartSeconds(0, 0, ASSUMPTIONS.queue_seconds), "a guess, the site's own"),
        *([_weights_part(config, rates)] if means.reads_weights else []),
        RestartPart("start engines and ranks", start, "published for SGLang: warm, and on a fresh node"),
        _state_part(needed, rates, means, start),
        RestartPart("weights to the engines", _always(durations["step_weight_sync"]), "as in a step"),
    ]


def _weights_part(config: Config, rates: Bandwidths) -> RestartPart:
    engine_bytes = rollout_bytes(config)
    is_shared = config.stage.copy == "nothing"
    seconds = (
        len(engine_nodes(config)) * engine_bytes / rates.shared_storage if is_shared else engine_bytes / rates.node_disk
    )
    return RestartPart(
        "read or copy the engines' weights on each node",
        _always(seconds),
        f"{engine_bytes / 1e9:,.0f} GB at the assumed rate of {'shared storage' if is_shared else 'a node disk'}",
    )


def _state_part(needed: Storage, rates: Bandwidths, means: Means, start: RestartSeconds) -> RestartPart:
    seconds = means.state_reads * needed.training_checkpoint / rates.shared_storage
    times = {0: "not read", 1: "read once"}.get(means.state_reads, "read twice")
    note = f"{needed.training_checkpoint / 1e12:.3g} TB, {times}, at the assumed rate of shared storage"
    if means.state_waits:
        return RestartPart("check and load the training state", _always(seconds), note)
    rest = RestartSeconds(*(max(seconds - getattr(start, kind), 0.0) for kind in KINDS))
    note = f"{note}: {seconds:,.0f} s, of which this is left when engines have started"
    return RestartPart("check and load the training state meanwhile", rest, note)


def checkpoint_reads(config: Config, needed: Storage) -> int:
    """Return how often a restart on the same layout reads the training state from shared storage: once or twice."""
    memory = config.site.host_memory_gib or config.hardware.host_memory_gib
    return 1 if needed.training_checkpoint / trainer_nodes(config) <= FREE_MEMORY_SHARE * memory * 2**30 else 2


def total(parts: Sequence[RestartPart]) -> RestartSeconds:
    """Return the sum of the parts."""
    return RestartSeconds(*(sum(getattr(part.seconds, kind) for part in parts) for kind in KINDS))


def _always(seconds: float) -> RestartSeconds:
    return RestartSeconds(seconds, seconds, seconds)
