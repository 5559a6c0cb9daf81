"""Reads the traces of a rehearsal's ranks, without torch, and finds problems in them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile, zip_longest
from pathlib import Path
from typing import Any

from posttrain.config.derived import takes_turns, uses_engines
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.phases import OPTIMIZER, PHASES, TRAINER
from posttrain_rehearsal.rank_subset import stage_size

KEY = "rehearsal"
# The number of tokens in these calls depends on values, so only their order is compared.
BY_VALUES = ("deepep dispatch", "deepep combine", "alltoall_base_", "alltoall_")
# Allowed between steps besides the state, for example caches of rotary embeddings.
ACTIVATIONS, LITTLE_SHARE, LITTLE_BYTES = "activations", 0.05, 1 << 16
THEIRS = (
    "transformer_engine/",
    "megatron/core/models/common/embeddings/",
    "megatron/core/pipeline_parallel/",
    "megatron/core/transformer/moe/",
)
OURS = tuple(f"rl/{part}/" for part in ("megatron_backend", "training", "weight_sync", "algorithm", "batching"))
BETWEEN_STEPS = ((2, "rollout"), (2, "save"))
# Kinds of tensors -> parts in the table of phases.
PART_OF = {"weights": TRAINER, "gradients": OPTIMIZER, "optimizer": OPTIMIZER}
LeftOut = Callable[[int, str], float]
# Megatron reduces gradients here, once per bucket and update.
GRADIENTS = "param_and_grad_buffer.py"


@dataclass(frozen=True)
class Call:
    """One rank's call to a process group."""

    name: str
    group: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bytes: int
    peer: int | None
    phase: str
    place: str
    of_host: bool = False

    @property
    def signature(self) -> tuple[Any, ...]:
        """The fields that must be equal on all ranks of the group."""
        return (self.name,) if self.name in BY_VALUES else (self.name, self.dtype, self.shapes)

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype} {list(map(list, self.shapes))} at {self.place}"


@dataclass(frozen=True)
class Trace:
    """The recorded events of one rank.

    Args:
        rank: The rank.
        seconds: Duration.
        error: Type, message and traceback of the error; None without one.
        phases: Phases in order, with the fields of `recorder.Phase`.
        groups: Ranks of each process group, in the order of creation.
        calls: Calls in order.
        counted: Name, count over the ranks, expected count, place of the sum.
        reductions: Part of a weight, ranks over which its gradients are reduced, place of their buffer.
        late: Places of the buffers whose gradients grew after their reduction had begun.
    """

    rank: int
    seconds: float
    error: Mapping[str, str] | None
    phases: Sequence[Mapping[str, Any]]
    groups: Sequence[Sequence[int]]
    calls: Sequence[Call]
    counted: Sequence[tuple[str, int, int, str]] = ()
    reductions: Sequence[Mapping[str, Any]] = ()
    late: Sequence[str] = ()

    @property
    def peak(self) -> Mapping[str, Any]:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase["peak"])


def read_traces(folder: Path) -> list[Trace]:
    """Return the traces in a folder, by rank."""
    traces = []
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        calls = [
            Call(**row | {"ranks": tuple(row["ranks"]), "shapes": tuple(map(tuple, row["shapes"]))})
            for row in content["collectives"]
        ]
        fields = ("rank", "seconds", "error", "phases", "groups", "counted", "reductions", "late")
        traces.append(Trace(**{name: content[name] for name in fields}, calls=calls))
    return sorted(traces, key=lambda trace: trace.rank)


def find_problems(
    config: Config, traces: Sequence[Trace], reserved_gib: float, left_out_gib: LeftOut = lambda rank, phase: 0.0
) -> list[Problem]:
    """Return what would fail, hang or corrupt a run on GPUs.

    Args:
        config: The resolved configuration.
        traces: Traces of all rehearsed ranks.
        reserved_gib: Memory that ranks do not see: contexts, buffers of communicators.
        left_out_gib: Memory that skipped layers add to a rank in a phase.
    """
    if problems := [*_errors(traces)]:
        # After an error, only compare what both ranks have: the rest may simply not have run yet.
        return [*_different_groups(traces, is_whole=False), *_unmatched(traces, is_whole=False), *problems]
    return [
        *_different_groups(traces),
        *_different_calls(traces),
        *_unmatched(traces),
        *_gradients_by_micro_batch(traces),
        *_gradients_too_early(traces),
        *_gradients_by_group(config, traces),
        *_miscounted(traces),
        *_waiting(config, traces),
        *_kept(traces),
        *_awake_in_others_turn(config, traces),
        *_memory(config, traces, reserved_gib, left_out_gib),
    ]


def _errors(traces: Sequence[Trace]) -> Iterator[Problem]:
    """Yield the errors of ranks, each kind once; hangs are skipped if another error caused them."""
    failed = [trace for trace in traces if trace.error]
    first = [trace for trace in failed if trace.error and trace.error["type"] != "HangError"] or failed
    by_words: dict[tuple[str, str], list[int]] = {}
    for trace in first:
        assert trace.error
        by_words.setdefault((trace.error["type"], _where(trace.error["trace"])), []).append(trace.rank)
    for (kind, where), ranks in by_words.items():
        message = next(t.error["message"] for t in first if t.rank == ranks[0] and t.error)
        value = f"{kind} on rank {ranks[0]}: {message.splitlines()[0] if message else ''}"
        if kind == "HangError":
            yield Problem(
                "ranks-hang", KEY, f"hang: {message}", "all ranks of a group make the same calls", f"look at {where}"
            )
        else:
            yield Problem("rank-fails", KEY, value, "every line runs", f"look at {where}; its trace is in the JSON")


def _where(trace: str) -> str:
    """Return the last line of our own code in a traceback."""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    ours = [line for line in lines if "/posttrain/" in line and "/posttrain_rehearsal/" not in line] or lines
    if not ours:
        return "its trace"
    path, number = ours[-1].split('"')[1], ours[-1].split("line ")[1].split(",")[0]
    return f"{path.rpartition('/posttrain/')[2]}:{number}"


def _different_groups(traces: Sequence[Trace], is_whole: bool = True) -> Iterator[Problem]:
    """Compare the groups of ranks: all, or only as many as both have."""
    for other in traces[1:]:
        pairs = (zip_longest if is_whole else zip)(traces[0].groups, other.groups)
        number = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if number is not None:
            value = f"ranks {traces[0].rank} and {other.rank} make another group number {number}"
            yield Problem(
                "groups-differ", KEY, value, "all ranks make all groups in the same order", "look at what makes groups"
            )
            return


def _different_calls(traces: Sequence[Trace]) -> Iterator[Problem]:
    """Compare the calls of each group's ranks; a difference would hang or mix up data."""
    by_group: dict[str, dict[int, list[Call]]] = {}
    for trace in traces:
        for call in trace.calls:
            if call.peer is None:
                by_group.setdefault(call.group, {}).setdefault(trace.rank, []).append(call)
        for ranks in {call.group: call.ranks for call in trace.calls}.items():
            if trace.rank in ranks[1]:
                by_group.setdefault(ranks[0], {}).setdefault(trace.rank, [])
    for group, of_rank in by_group.items():
        members = {rank for calls in of_rank.values() for call in calls for rank in call.ranks}
        there = [trace.rank for trace in traces if trace.rank in members]
        for one, two in combinations(there, 2):
            for mine, theirs in zip_longest(of_rank.get(one, []), of_rank.get(two, [])):
                if mine is None or theirs is None or mine.signature != theirs.signature:
                    value = (
                        f"hang: rank {one} calls {mine or 'nothing'}, rank {two} of group {group} {theirs or 'nothing'}"
                    )
                    where = _with_ours(traces, one if mine else two, mine or theirs)
                    yield Problem(
                        "calls-differ", KEY, value, "all ranks of a group make the same calls", f"look at {where}"
                    )
                    return


def _with_ours(traces: Sequence[Trace], rank: int, call: Call) -> str:
    """Return a call's place; if it has no line of ours, as in a backward pass, add our last one before it."""
    if call.place.startswith(OURS):
        return call.place
    calls = next(trace.calls for trace in traces if trace.rank == rank)
    before = [other.place for other in takewhile(lambda other: other is not call, calls)]
    last = next((place for place in reversed(before) if place.startswith(OURS)), "")
    return f"{call.place}, after {last}" if last else call.place


def _unmatched(traces: Sequence[Trace], is_whole: bool = True) -> Iterator[Problem]:
    """Compare the messages that each pair of ranks sends and receives: all, or only as many as both have."""
    there = {trace.rank for trace in traces}
    sent: dict[tuple[int, int], list[Call]] = {}
    received: dict[tuple[int, int], list[Call]] = {}
    for trace in traces:
        for call in trace.calls:
            if call.peer in there and call.name == "send":
                sent.setdefault((trace.rank, call.peer), []).append(call)
            elif call.peer in there and call.name == "recv_":
                received.setdefault((call.peer, trace.rank), []).append(call)
    for pair in sorted({*sent, *received}):
        for mine, theirs in (zip_longest if is_whole else zip)(sent.get(pair, []), received.get(pair, [])):
            if not (mine and theirs) or (mine.dtype, mine.shapes) != (theirs.dtype, theirs.shapes):
                value = f"hang: rank {pair[0]} sends {mine or 'nothing'}, rank {pair[1]} receives {theirs or 'nothing'}"
                where = (mine or theirs).place
                yield Problem(
                    "message-unmatched", KEY, value, "every message that is sent is received", f"look at {where}"
                )
                return


def _gradients_by_micro_batch(traces: Sequence[Trace]) -> Iterator[Problem]:
    """Find gradients that are reduced more often in an update of more micro-batches, which adds them repeatedly."""
    for trace in traces:
        counts = Counter(
            call.phase.split()[0]
            for call in trace.calls
            if GRADIENTS in call.place and "reduce" in call.name and call.phase.endswith(" train")
        )
        if len(set(counts.values())) > 1:
            place = next(call.place for call in trace.calls if GRADIENTS in call.place and "reduce" in call.name)
            found = " and ".join(f"{count} times in step {step}" for step, count in sorted(counts.items()))
            value = f"rank {trace.rank} adds up gradients {found}, which differ in micro-batches"
            remedy = f"look at {place}, and at `no_sync_func`"
            yield Problem("gradients-per-micro-batch", KEY, value, "once for each bucket and update", remedy)
            return


def _gradients_too_early(traces: Sequence[Trace]) -> Iterator[Problem]:
    for trace in traces:
        if trace.late:
            value = f"rank {trace.rank} gives gradients away to be added up, and later micro-batches add to them"
            remedy = f"look at {trace.late[0]}, and at `no_sync_func`"
            yield Problem("gradients-too-early", KEY, value, "after an update's last micro-batch", remedy)
            return


def _gradients_by_group(config: Config, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Compare the ranks that hold a part of a weight with those over which its gradients are reduced.

    Parts that tensor-parallel ranks replicate, or that two stages share, are reduced over those ranks separately.
    """
    tensor, of_stage = config.parallel.tensor_model_parallel_size, stage_size(config)
    there, held = {trace.rank for trace in traces}, defaultdict(set)
    for trace in traces:
        for row in trace.reductions:
            held[str(row["part"])].add(trace.rank)
    for trace in traces:
        for row in trace.reductions:
            holders, name = held[str(row["part"])], row["part"][0]
            alike = {rank for rank in holders if rank // of_stage == trace.rank // of_stage}
            alike = {rank for rank in alike if rank % of_stage % tensor == trace.rank % of_stage % tensor}
            others, left_out = {*row["ranks"]} & there - holders, alike - {*row["ranks"]}
            if others or left_out:
                found = f"without rank {min(left_out)}, which holds" if left_out else f"with rank {min(others)}'s, of"
                value = (
                    f"rank {trace.rank} adds up gradients of {name} {found} {'it, too' if left_out else 'another part'}"
                )
                remedy = f"look at {row['place']}"
                yield Problem("gradients-of-wrong-group", KEY, value, "over all ranks that hold the same part", remedy)
                return


def _miscounted(traces: Sequence[Trace]) -> Iterator[Problem]:
    wrong = [(trace.rank, row) for trace in traces for row in trace.counted if row[1] != row[2]]
    if wrong:
        # Stages that only receive the sum have no place for it.
        rank, (what, found, expected, where) = max(wrong, key=lambda pair: bool(pair[1][3]))
        value = f"rank {rank} counts {found} {what} of {expected}"
        yield Problem("miscounted", KEY, value, "each once", f"look at {where}: over which ranks it adds up")


def _waiting(config: Config, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Find GPU collectives in which ranks wait while engines generate: NCCL's kernel would occupy their GPUs."""
    if not uses_engines(config):
        return
    for trace in traces:
        call = next((call for call in trace.calls if call.phase.endswith(" rollout") and not call.of_host), None)
        if call:
            value = f"rank {trace.rank} waits in NCCL's {call.name} at {call.place} while engines answer"
            yield Problem("waits-in-nccl", KEY, value, "ranks wait for a rollout in gloo", f"look at {call.place}")
            return


def _kept(traces: Sequence[Trace]) -> Iterator[Problem]:
    """Find tensors of a step that are still alive at the next step or a save, besides weights, gradients and state."""
    for trace in traces:
        # The maximum, because weights may be offloaded between steps.
        weights = max((_size_of("weights", phase) for phase in trace.phases), default=0)
        for phase in trace.phases:
            if (phase["step"], phase["name"]) not in BETWEEN_STEPS:
                continue
            ours = [row for row in phase["holders"] if row[0] == ACTIVATIONS and _is_ours(row[1])]
            _, where, size = max(ours, key=lambda holder: holder[2], default=("", "", 0))
            if size > max(LITTLE_BYTES, weights * LITTLE_SHARE):
                value = f"{size / GIB:.3f} GiB of {where} outlive their step on rank {trace.rank}"
                remedy = f"look at {where.split()[0]}"
                yield Problem("memory-kept", KEY, value, f"at most {LITTLE_SHARE:.0%} of the weights", remedy)
                return


def _size_of(kind: str, phase: Mapping[str, Any]) -> int:
    return sum(size for of, _, size in phase["holders"] if of == kind)


def _awake_in_others_turn(config: Config, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Find tensors that a phase does not need (`plan.sizing.phases`) but that are not offloaded in it."""
    if not takes_turns(config):
        return
    for trace in traces:
        for phase in (phase for phase in trace.phases if phase["step"] > 0 and phase["name"] in PHASES):
            may_sleep = {kind for kind, part in PART_OF.items() if part not in PHASES[phase["name"]].awake}
            asleep = [holder for holder in phase["holders"] if holder[0] in may_sleep]
            kind, where, size = max(asleep, key=lambda holder: holder[2], default=("", "", 0))
            if size > LITTLE_BYTES:
                value = f"{size / GIB:.3f} GiB of {kind} are awake on rank {trace.rank} in {phase['name']}"
                allowed = "memory that a phase does not use is offloaded (engine.sleep)"
                remedy = f"look at what puts it to sleep, and at {where.split()[0]}"
                yield Problem("awake-while-unused", KEY, value, allowed, remedy)
                return


def _is_ours(where: str) -> bool:
    """Return whether our code, or Megatron for us, created a tensor; THEIRS cache their last tensors."""
    return where.startswith(OURS) and not any(theirs in where for theirs in THEIRS)


def _memory(config: Config, traces: Sequence[Trace], reserved_gib: float, left_out_gib: LeftOut) -> Iterator[Problem]:
    gib = {
        (trace.rank, phase["name"]): phase["peak"] / GIB + left_out_gib(trace.rank, phase["name"])
        for trace in traces
        for phase in trace.phases
    }
    (rank, name), used = max(gib.items(), key=lambda item: item[1])
    if (needed := used + reserved_gib) <= config.hardware.memory_gib_per_gpu:
        return
    trace = next(trace for trace in traces if trace.rank == rank)
    phase = max((phase for phase in trace.phases if phase["name"] == name), key=lambda phase: phase["peak"])
    kind, where, _ = max(phase["holders"], key=lambda holder: holder[2])
    allowed = f"at most {config.hardware.memory_gib_per_gpu} GiB; {reserved_gib:.1f} are contexts and communicators"
    remedy = "fewer tokens, more nodes, or another layout: `posttrain plan` proposes some"
    yield Problem(
        "trainer-exceeds-memory",
        "trainer.max_tokens_per_gpu",
        f"{needed:.1f} GiB on rank {rank} in {name}, most of it {kind} of {where}",
        allowed,
        remedy,
    )
