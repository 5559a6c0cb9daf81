"""Qwen3.5 in BF16: what its checkpoints have in FP32 stays FP32, from conversion through training to the export."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.exporting import export_in_parts
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.small_updates import apply, updates_of
from tests.support.tiny_checkpoint import TINY_QWEN3_5
from tests.unit.rl.megatron_backend.test_families import convert_family

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.plan.sizing.phases import OPTIMIZER, TRAINER
from posttrain.rl.megatron_backend.checkpoint import load_training_state, load_weights, prepare_save
from posttrain.rl.megatron_backend.model import build_policy
from posttrain.rl.megatron_backend.optimizer_state import state_tensors
from posttrain.rl.megatron_backend.sleep import SleepingTrainer
from posttrain.rl.megatron_backend.weights import HubWeights

WIDE = ("linear_attn.A_log", "linear_attn.norm.weight")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return convert_family(tmp_path_factory.mktemp("qwen3_5"), TINY_QWEN3_5)


def policy_of(converted):
    config = test_config(TINY_QWEN3_5)
    training = dataclasses.replace(config.training, global_batch_size=24)
    trainer = dataclasses.replace(config.trainer, params_dtype="bf16")
    config = dataclasses.replace(config, training=training, trainer=trainer)
    initialize_single_rank(config)
    policy = build_policy(config)
    load_weights(policy.chunks, converted / "torch_dist")
    policy.optimizer.reload_model_params()
    return policy


def test_weights_in_fp32_come_from_the_checkpoint_bit_by_bit(converted):
    source, seen = CheckpointReader(converted / "hf"), {torch.bfloat16: 0, torch.float32: 0}
    for name, tensor in HubWeights(policy_of(converted).chunks, TINY_QWEN3_5).gather():
        assert tensor.dtype is (torch.float32 if name.endswith(WIDE) else torch.bfloat16)
        assert torch.equal(tensor, source.tensor(name)), name
        seen[tensor.dtype] += 1
    assert seen[torch.float32] == 2 * 2


def test_an_update_of_less_than_a_bf16_rounding_is_kept_saved_and_exported(converted, tmp_path):
    policy, other = policy_of(converted), policy_of(converted)
    (update,) = updates_of(policy, 0)
    apply(policy, update, lr=1e-6)
    trained = dict(HubWeights(policy.chunks, TINY_QWEN3_5).gather())
    source = CheckpointReader(converted / "hf")
    for name in (name for name in trained if name.endswith(WIDE)):
        moved = (trained[name] - source.tensor(name)).abs()
        assert (moved > 0).all(), name
        assert moved.max() < 2e-6, name
    (tmp_path / "step").mkdir()
    prepare_save(policy, 1, tmp_path / "step")()
    assert load_training_state(other, tmp_path / "step") == 1
    (update,) = updates_of(policy, 1)
    for one in (policy, other):
        apply(one, update, lr=1e-6)
    tensors = ([*one.parameters(), *state_tensors(one.optimizer)] for one in (policy, other))
    assert all(torch.equal(*pair) for pair in zip(*tensors, strict=True))
    exported = CheckpointReader(export_in_parts(tmp_path / "step", converted / "hf", TINY_QWEN3_5, tmp_path / "hf"))
    assert all(torch.equal(exported.tensor(name), tensor) for name, tensor in trained.items())


def test_a_policy_that_slept_has_its_bits(converted):
    policy = policy_of(converted)
    (update,) = updates_of(policy, 0)
    apply(policy, update, lr=1e-3)
    tensors = [*policy.parameters(), *state_tensors(policy.optimizer)]
    before, trainer = [tensor.detach().clone() for tensor in tensors], SleepingTrainer(policy)
    trainer.sleep([OPTIMIZER, TRAINER])
    assert {parameter.untyped_storage().nbytes() for parameter in policy.parameters()} == {0}
    trainer.wake([TRAINER, OPTIMIZER])
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
