"""Rollouts of a rehearsal: so many samples as fill a few rows of every data-parallel rank."""

from __future__ import annotations

import random
from dataclasses import replace

from posttrain.config.derived import data_parallel_size, micro_batch_multiple
from posttrain.config.schema import Config
from posttrain.planner.sizing.activations import MicroBatch, fullest_micro_batch
from posttrain.planner.sizing.assumptions import ASSUMPTIONS
from posttrain.rollout.coordinator import RolloutResult
from posttrain.types import Prompt, Sample, SampleGroup


def shortened(config: Config) -> Config:
    """Return the configuration for a few micro-batches a step: as many as fill the pipeline.

    What a run compares now and then is compared in each step, so the fullest rows are, too, beside the whole state.
    """
    stages = config.parallel.pipeline_model_parallel_size
    rows = max(2, stages, micro_batch_multiple(config))
    count = data_parallel_size(config) * rows * fullest_micro_batch(config, ASSUMPTIONS).num_sequences
    return replace(
        config,
        rollout=replace(config.rollout, rollout_batch_size=1, num_samples_per_prompt=count),
        training=replace(config.training, global_batch_size=count, num_steps=100),
        trainer=replace(config.trainer, mismatch_interval=min(1, config.trainer.mismatch_interval)),
        evaluation=replace(config.evaluation, interval=0),
    )


def rehearsed_row(config: Config) -> MicroBatch:
    """Return the fullest row of a rehearsal: of samples that are equally long."""
    fullest = fullest_micro_batch(config, ASSUMPTIONS)
    length = fullest.tokens // fullest.num_sequences
    return MicroBatch(fullest.num_sequences * length, fullest.num_sequences, length)


class MadeUpRollouts:
    """A `RolloutSource`: the second step has the longest samples that there can be, the first shorter ones.

    Only then all of the optimizer's state is there, which the first update makes.

    Args:
        config: From `shortened`.
    """

    def __init__(self, config: Config):
        self._config, self._longest = config, rehearsed_row(config).longest

    def wait_ready(self) -> None:
        """There are no engines."""

    def collect(self, step: int) -> RolloutResult:
        """Return one group; every second sample is right, so that there is something to learn."""
        source = random.Random(step)
        response = self._config.rollout.max_response_tokens
        samples = []
        for index in range(self._config.rollout.num_samples_per_prompt):
            share = 1 if step else source.uniform(0.1, 0.9)
            length = max(2, int(self._longest * share))
            answer = min(response, length - 1)
            prompt = (1,) * (length - answer)
            samples.append(Sample(0, index, prompt, (1,) * answer, (-1.0,) * answer, "stop", 0, float(index % 2)))
        return RolloutResult([SampleGroup(Prompt(0, (), ""), tuple(samples))], 0)
