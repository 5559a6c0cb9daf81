"""Data-parallel ranks get the same work: as torch counts it on the trainer's own layers, not as the packer says."""

from __future__ import annotations

import dataclasses
import random

import pytest
from tests.support.counted_flops import layer_flops
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TRAINED

from posttrain.rl.batching.packing import pack
from posttrain.rl.training.batch import sample_costs

NUM_SAMPLES, BUDGET = 512, 2048


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    """Log-normal, as answers to mathematical problems are, in steps of 64."""
    source = random.Random(3)
    return [64 * min(max(round(source.lognormvariate(1.6, 0.8)), 1), 24) for _ in range(NUM_SAMPLES)]


@pytest.fixture(scope="module")
def config():
    """Proportions of GLM-5: at the longest lengths attention multiplies about as much as all matrices."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "v_head_dim": 24}
    config = test_config(dataclasses.replace(TRAINED, **sizes))
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, recompute_granularity="none"))


@pytest.fixture(scope="module")
def counted(config, lengths) -> dict[int, int]:
    """Return the operations of all layers by length."""
    from posttrain.rl.megatron_backend.model import build_model

    initialize_single_rank(config)
    layers, hidden = build_model(config)[0].decoder.layers, config.model.architecture.hidden_size
    for parameter in layers.parameters():
        parameter.data.normal_(0, 0.05)
    # A dense layer first, then layers with experts.
    kinds = {0: 1, 1: len(layers) - 1}
    return {
        length: sum(count * layer_flops(layers[kind], hidden, length) for kind, count in kinds.items())
        for length in set(lengths)
    }


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64])
def test_ranks_share_the_operations(config, lengths, counted, num_ranks) -> None:
    costs = sample_costs(config, lengths)
    plan = pack(lengths, costs, BUDGET, num_ranks)
    loads = [sum(counted[lengths[i]] for indices in rank for i in indices) for rank in plan]
    mean = sum(loads) / num_ranks
    largest = max(counted.values())
    assert max(loads) / mean <= max(1.05, 1.02 * max(1.0, largest / mean))
    assert all(sum(lengths[i] for i in indices) <= BUDGET for rank in plan for indices in rank)
    # By tokens alone, it is not.
    by_tokens = pack(lengths, lengths, BUDGET, num_ranks)
    others = [sum(counted[lengths[i]] for indices in rank for i in indices) for rank in by_tokens]
    assert max(others) > max(loads)
