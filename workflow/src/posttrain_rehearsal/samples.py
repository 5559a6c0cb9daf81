"""Rollouts of a rehearsal, with enough trajectories to fill a few rows of every data-parallel rank."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from posttrain.config.derived import data_parallel_size, micro_batch_multiple
from posttrain.config.schema import Config
from posttrain.plan.sizing.activations import fullest_micro_batch
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.rl.engines.routes import smallest
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.training.batch import plan_rows, row_multiples
from posttrain.types import Prompt, RolloutResult, Routes, Trajectory, TrajectoryGroup
from posttrain_rehearsal.sampled_shapes import AS_PLANNED, Length, SampledShapes, rehearsed_row

# Lengths of the first step's trajectories, as fractions of the longest: most have the first, some of the first
# data-parallel rank's the second, some of the other ranks' the third. Each new length of a row takes time, so there are
# few.
SHORTER, AT_LEAST = (0.6, 0.15, 0.05), (2, 3, 2)
# Minimum rows of a rank in the second step; the first has fewer, of different lengths.
FEWEST_ROWS = 3
# At most this many trajectories of a rank are shortened.
TRIES = 3
# A step beyond every rehearsal.
NEVER = 100


def shortened(config: Config, drawn: SampledShapes = AS_PLANNED) -> Config:
    """Return the configuration with a few micro-batches per step: enough to fill the pipeline.

    Periodic comparisons run in the second step, with the fullest rows and all of the optimizer's state.

    Args:
        config: The resolved configuration.
        drawn: With given lengths, which may be shorter, a row holds more trajectories.
    """
    stages, at_a_time = config.parallel.pipeline_model_parallel_size, micro_batch_multiple(config)
    rows, fullest = max(FEWEST_ROWS, stages, 2 * at_a_time), fullest_micro_batch(config, ASSUMPTIONS)
    per_row = fullest.num_sequences
    if drawn.lengths:
        mean = sum(map(sum, drawn.lengths)) / len(drawn.lengths)
        per_row = max(per_row, round(fullest.tokens / mean))
    count = data_parallel_size(config) * rows * per_row
    return replace(
        config,
        rollout=replace(config.rollout, rollout_batch_size=1, num_samples_per_prompt=count),
        training=replace(config.training, global_batch_size=count, num_steps=NEVER),
        trainer=replace(
            config.trainer, mismatch_interval=min(2, config.trainer.mismatch_interval), save_interval=NEVER
        ),
        evaluation=replace(config.evaluation, interval=0),
    )


class MadeUpRollouts:
    """A `RolloutMaker`: the second step has the longest possible trajectories, the first shorter ones.

    The optimizer's state exists only after the first update. With given lengths, the first step gets the shorter half
    of the drawn trajectories, the second the longer half.

    Args:
        config: From `shortened`.
        drawn: Distributions of a rehearsal.
    """

    def __init__(self, config: Config, drawn: SampledShapes = AS_PLANNED):
        self._config, self._drawn, self._longest = config, drawn, rehearsed_row(config).longest
        self._routes = self._one_file() if config.algorithm.routing_replay else None

    async def collect(self, step: int) -> RolloutResult:
        """Return the rollout of a step; see `of_step`."""
        return self.of_step(step)

    def of_step(self, step: int) -> RolloutResult:
        """Return one group of a step, from 1; rewards alternate between 0 and 1, so that advantages are not 0."""
        trajectories = [
            self._routed(
                Trajectory.of_response(
                    (1,) * prompt,
                    (1,) * response,
                    (-1.0,) * response,
                    0,
                    prompt_id=0,
                    sample_index=i,
                    reward=float(i % 2),
                )
            )
            for i, (prompt, response) in enumerate(self._lengths(step))
        ]
        return RolloutResult([TrajectoryGroup(Prompt(0, (), ""), tuple(trajectories))], 0)

    def _one_file(self) -> Routes:
        """Write the routes of the longest trajectory: its tokens go to all experts in turn."""
        arch, tokens = self._config.model.architecture, max(2, self._longest, *map(sum, self._drawn.lengths))
        layers = arch.num_hidden_layers - arch.first_k_dense_replace
        places = np.arange(tokens * layers * arch.num_experts_per_tok) % arch.n_routed_experts
        routes = places.reshape(tokens, layers, -1).astype(smallest(arch.n_routed_experts))
        self._folder = tempfile.TemporaryDirectory(prefix="routes-")  # deleted with this object
        return RolloutStore(Path(self._folder.name)).write_routes(0, 0, [[routes]])[0][0]

    def _routed(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with routes; all trajectories use the beginning of one file."""
        if not self._routes:
            return trajectory
        layers, _, per_token = self._routes.shape
        routes = replace(self._routes, shape=(layers, trajectory.num_tokens - 1, per_token))
        return replace(trajectory, routes=(routes,))

    def _lengths(self, step: int) -> list[Length]:
        count, response = self._config.rollout.num_samples_per_prompt, self._config.rollout.max_response_tokens
        if self._drawn.lengths:
            of_both = sorted(random.Random(0).choices(self._drawn.lengths, k=2 * count), key=sum)
            half = of_both[count:] if step > 1 else of_both[:count]
            random.Random(step).shuffle(half)
            return half
        wholes = self._shorter(count) if step == 1 else [max(2, self._longest)] * count
        return [(whole - answer, answer) for whole in wholes for answer in [min(response, whole - 1)]]

    def _shorter(self, count: int) -> list[int]:
        """Return lengths of trajectories that fill fewer rows than the longest do; each rank's rows differ in length.

        The first two ranks' rows differ, too. If trajectories are very short, these differences may vanish.
        """
        lengths = (int(self._longest * share) for share in SHORTER)
        most, some, others = map(max, AT_LEAST, lengths)
        ranks = data_parallel_size(self._config)
        fewer_than = len(self._rows([max(2, self._longest)] * count)[0])
        found = [most] * count
        for times in range(1, min(TRIES, count // ranks) + 1):
            shorter = [some] * times + [others] * times * (ranks - 1)
            found = [*shorter, *[most] * (count - len(shorter))]
            rows = self._rows(found)
            is_uneven = all(len({*map(self._padded, row)}) > 1 for row in rows)
            if is_uneven and rows[:1] != rows[1:2] and len(rows[0]) < fewer_than:
                break
        return found

    def _rows(self, wholes: Sequence[int]) -> list[list[int]]:
        """Return the unpadded tokens of each row of each data-parallel rank."""
        of_sequence = row_multiples(self._config)[1]
        lengths = [-(-whole // of_sequence) * of_sequence for whole in wholes]
        plan = plan_rows(self._config, wholes)
        return [[sum(lengths[place] for place in places) for places in rank] for rank in plan]

    def _padded(self, tokens: int) -> int:
        multiple = row_multiples(self._config)[0]
        return -(-tokens // multiple) * multiple
