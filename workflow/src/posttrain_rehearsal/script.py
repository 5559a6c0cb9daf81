"""The work of one rank in a rehearsal: build, load, run two steps of `rl.training.loop`, save, and resume."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from posttrain.config.derived import takes_turns, uses_engines, weight_transport, world_size
from posttrain.config.schema import Config
from posttrain.plan.sizing.assumptions import Assumptions
from posttrain.plan.sizing.phases import ASLEEP
from posttrain_rehearsal.device import SimulatedDevice
from posttrain_rehearsal.distributed import Groups, join
from posttrain_rehearsal.messages import Messages
from posttrain_rehearsal.rank_subset import stage_size
from posttrain_rehearsal.recorder import Recorder
from posttrain_rehearsal.sampled_shapes import SampledShapes
from posttrain_rehearsal.samples import MadeUpRollouts, shortened

aten = torch.ops.aten
STEPS = 2
# Upper bound of the score added to the first rank's experts, and steps of its bisection.
MOST_PREFERRED, BISECTIONS = 8.0, 12


def rehearse(
    config: Config, drawn: SampledShapes, rank: int, recorder: Recorder, messages: Messages, files: Path
) -> None:
    """Run one rank.

    Args:
        config: The resolved configuration.
        drawn: Distributions of lengths and of expert loads.
        rank: This rank.
        recorder: Records the rank's operations.
        messages: Messages to the other rehearsed ranks.
        files: Folder shared by all ranks; has `torch_dist`, from `disk.converted`.
    """
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.simulated import tell_of_late_gradients
    from posttrain.rl.training import loop
    from posttrain_rehearsal import disk, memoized_ops, simulated_sleep, values

    small = shortened(config, drawn)
    groups = Groups(recorder, messages)
    join(rank, world_size(config), config.hardware.gpus_per_node, recorder.created, groups.of_host)
    device = groups.device = SimulatedDevice(recorder, groups, Unknown(config, drawn.assumptions, rank))
    recorder.values = device.mirror
    _follow_phases(recorder)
    tell_of_late_gradients(
        lambda buffer: recorder.late.append(recorder.place_of(buffer.grad_data.untyped_storage()._cdata))
    )
    disk.provide(device.fake)
    memoized_ops.provide(recorder)
    values.provide(recorder, device, spoils=rank == messages.members[0])
    simulated_sleep.provide(device, recorder)
    with device:
        with recorder.phase("build"):
            initialize(small)
            policy = build_policy(small)
        _label(recorder, policy)
        with recorder.phase("open"):
            trainer = _sleeper(recorder, policy) if takes_turns(small) else None
            state = disk.saved_state(policy, files / "torch_dist", files / "checkpoints", 0, trainer)
            run, weights = _run_of(small, drawn, policy, state, trainer, rank, messages.members, recorder)
        recorder.reductions = reductions(recorder, policy, weights)
        with recorder.phase("load"):
            run.resume()
        gc.freeze()  # these objects stay alive, so garbage collections can skip them
        for step in range(1, STEPS + 1):
            recorder.step = step
            loop.train_step(run, step)
            _label(recorder, policy)
        if run.turns:
            run.turns.enter("save")
        with recorder.phase("save"):
            state.begin_save(STEPS)
        recorder.begin_anew()
        with recorder.phase("resume"):
            again = build_policy(small)
            _label(recorder, again)
            disk.saved_state(again, files / "torch_dist", files / "checkpoints", STEPS).restore()


def _sleeper(recorder: Recorder, policy: Any) -> Any:
    from posttrain_rehearsal.simulated_sleep import SimulatedSleep

    return SimulatedSleep(policy, lambda: _label(recorder, policy))


class Unknown:
    """Substitutes for unknown values.

    Experts of tokens are random: those of rank 0 get `expert_imbalance` times their share, the stage's other ranks the
    rest. The first expert of every other rank gets none.

    Args:
        config: The resolved configuration.
        assumptions: The plan's assumptions, with the imbalance.
        rank: This rank.
    """

    def __init__(self, config: Config, assumptions: Assumptions, rank: int):
        self._imbalance = assumptions.expert_imbalance
        self._arch, self._parallel = config.model.architecture, config.parallel
        self._place = rank % stage_size(config)
        self._drawn = lru_cache(self._draw)

    def __call__(self, func: Any, args: Sequence[Any]) -> Any:
        """Return the substitute result of an operation."""
        if func is aten.topk.default:
            scores, count = args[0], args[1]
            if scores.shape[-1] != self._arch.n_routed_experts or count != self._arch.num_experts_per_tok:
                return NotImplemented
            chosen = self._drawn(tuple(scores.shape), count)
            return torch.zeros(chosen.shape, dtype=scores.dtype), chosen.clone()
        if func is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 0
        if func is aten.nonzero.default:
            return torch.ones(args[0].shape).nonzero()
        raise NotImplementedError(f"{func} of values that nobody knows")

    def _draw(self, shape: tuple[int, ...], count: int) -> torch.Tensor:
        experts = self._arch.n_routed_experts // self._parallel.expert_model_parallel_size
        number = self._place // self._parallel.expert_tensor_parallel_size % self._parallel.expert_model_parallel_size
        source = torch.Generator().manual_seed(self._place)
        scores = -torch.rand(shape, generator=source).log().neg().log()
        mine = slice(number * experts, (number + 1) * experts)
        if self._parallel.expert_model_parallel_size == 1:
            return scores.topk(count, dim=-1).indices
        if self._place == 0:
            share = min(1.0, self._imbalance / self._parallel.expert_model_parallel_size)
            scores[..., mine] += _preference(scores, mine, count, share)
        elif experts > 1:
            scores[..., mine.start] = -math.inf
        return scores.topk(count, dim=-1).indices


def _preference(scores: torch.Tensor, mine: slice, count: int, share: float) -> float:
    """Return the number to add to some experts' scores so that they are a given share of the chosen experts."""
    low, high = 0.0, MOST_PREFERRED
    for _ in range(BISECTIONS):
        middle, raised = (low + high) / 2, scores.clone()
        raised[..., mine] += middle
        chosen = raised.topk(count, dim=-1).indices
        found = ((chosen >= mine.start) & (chosen < mine.stop)).float().mean().item()
        low, high = (middle, high) if found < share else (low, middle)
    return high


class _Metrics:
    """Collects the metrics of rank 0."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics."""
        self.steps.append(metrics)


def _run_of(
    config: Config,
    drawn: SampledShapes,
    policy: Any,
    state: Any,
    trainer: Any,
    rank: int,
    there: Sequence[int],
    recorder: Recorder,
) -> tuple[Any, Any]:
    from posttrain.rl.megatron_backend import weights as weights_module
    from posttrain.rl.megatron_backend.plain_data import share_plain
    from posttrain.rl.megatron_backend.served_values import ServedValues
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.rollout.source import SharedSource
    from posttrain.rl.training.assembly import objective_of
    from posttrain.rl.training.colocation import Colocation, wait_for_all
    from posttrain.rl.training.mismatch import EngineComparison
    from posttrain.rl.training.run import TrainingRun
    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.publish import WeightPublisher, narrowed_names, served_format
    from posttrain_rehearsal import receivers, simulated_sleep

    everybody = weights_module.gather_plain

    def those_there(mine: Any, group: Any = None) -> list[Any]:
        """Gather with empty lists for absent ranks."""
        return [pieces if rank in there else [] for rank, pieces in enumerate(everybody(mine, group))]

    weights_module.gather_plain = those_there
    weights = HubWeights(policy.chunks, config.model.architecture)
    weights.leave_only(receivers.one_of_each_kind(weights.names))
    values = ServedValues(weights, served_format(config), narrowed_names(config))
    has_engines, runner = uses_engines(config), asyncio.Runner()
    published = config
    if weight_transport(config) == "sharded":
        receivers.provide(recorder, config)
        engine_shards: EngineShards = receivers.SimulatedEngineShards(values, None, runner, config)
    else:
        # There are no receivers, so weights are gathered on rank 0 for the transport "tensor".
        engine_shards = EngineShards(values, None, runner)
        published = replace(config, engine=replace(config.engine, weight_transport="tensor"))
    run = TrainingRun(
        config=config,
        policy=policy,
        objective=objective_of(config),
        source=SharedSource(runner, share_plain, 0.0, None, MadeUpRollouts(config, drawn) if rank == 0 else None),
        comparison=EngineComparison(config, policy, values) if has_engines else None,
        publisher=WeightPublisher(published, engine_shards, Path(), Path()) if has_engines else None,
        state=state,
        sinks=cast(Any, _Metrics()) if rank == 0 else None,
        traces=Path(),
        turns=Colocation(trainer, simulated_sleep.NoEngines(), wait_for_all) if trainer else None,
    )
    return run, weights


def _follow_phases(recorder: Recorder) -> None:
    from posttrain.rl.training.phases import PhaseClock

    original = PhaseClock._timed

    @contextmanager
    def timed(self: PhaseClock, name: str) -> Iterator[None]:
        # Sleeping and waking belong to neither of the adjacent phases.
        with nullcontext() if name == ASLEEP.name else recorder.phase(name), original(self, name):
            yield

    PhaseClock._timed = timed  # type: ignore[method-assign]


def reductions(recorder: Recorder, policy: Any, weights: Any) -> list[dict[str, Any]]:
    """Return this rank's parts of weights with the ranks over which their gradients are reduced.

    Args:
        recorder: Has the places that created buffers.
        policy: Has the gradient buffers.
        weights: The same parts by name.
    """
    buffers = {buffer.param_data.untyped_storage()._cdata: buffer for buffer in policy.buffers}
    rows = []
    for piece, tensor in weights.parts.items():
        if buffer := buffers.get(tensor.untyped_storage()._cdata):
            ranks = torch.distributed.get_process_group_ranks(buffer.data_parallel_group)
            place = recorder.place_of(buffer.grad_data.untyped_storage()._cdata)
            rows.append({"part": [piece.key, piece.offset, piece.shape], "ranks": ranks, "place": place})
    return rows


def _label(recorder: Recorder, policy: Any) -> None:
    """Label the storages of weights, gradients and the optimizer's state."""

    def name(tensor: Any, kind: str) -> None:
        if isinstance(tensor, torch.Tensor):
            recorder.label(tensor.untyped_storage()._cdata, kind)

    for parameter in policy.parameters():
        name(parameter, "weights")
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                name(parameter, "optimizer")
                for value in part.optimizer.state.get(parameter, {}).values():
                    name(value, "optimizer")
    for buffer in policy.buffers:
        name(buffer.param_data, "weights")
        name(buffer.grad_data, "gradients")
