"""A rank's weights and optimizer that sleep in host memory: really gone meanwhile, and the same bits afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest
import torch
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.small_updates import apply, updates_of
from tests.support.tiny_checkpoint import TRAINED

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.config.schema import Architecture, Config
from posttrain.plan.sizing.phases import OPTIMIZER, TRAINER
from posttrain.rl.megatron_backend.checkpoint import prepare_save
from posttrain.rl.megatron_backend.optimizer_state import state_tensors
from posttrain.rl.megatron_backend.sleep import SleepingTrainer

LR = 1e-3
PRECISIONS = ("fp32", "bf16")


def config_of(params_dtype: str, architecture: Architecture = TRAINED) -> Config:
    config = test_config(architecture)
    training = dataclasses.replace(config.training, global_batch_size=24)
    trainer = dataclasses.replace(config.trainer, params_dtype=params_dtype)
    return dataclasses.replace(config, training=training, trainer=trainer)


@pytest.fixture(params=PRECISIONS)
def awake(make_policy, request):
    """A policy that has made an update: in FP32 its optimizer has the weights themselves, in BF16 copies of them."""
    policy = make_policy(config_of(request.param))
    (update,) = updates_of(policy, 0)
    apply(policy, update, LR)
    return policy


def bits_of(policy) -> list[torch.Tensor]:
    """Return weights, those that are not trained, too, and the optimizer's state."""
    return [tensor.detach().clone() for tensor in (*policy.parameters(), *state_tensors(policy.optimizer))]


def storages_of(policy) -> list[int]:
    """Return the bytes of the storages of weights and gradients."""
    tensors = [*policy.parameters(), *(buffer.grad_data for buffer in policy.buffers)]
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_what_sleeps_has_no_memory_and_what_wakes_up_has_its_bits(awake) -> None:
    before, trainer = bits_of(awake), SleepingTrainer(awake)
    for _ in range(3):
        trainer.sleep([OPTIMIZER])
        assert [tensor.untyped_storage().nbytes() for tensor in (b.grad_data for b in awake.buffers)] == [
            0 for _ in awake.buffers
        ]
        trainer.sleep([TRAINER])
        assert {*storages_of(awake)} == {0}
        trainer.wake([TRAINER])
        trainer.wake([OPTIMIZER])
        assert 0 not in storages_of(awake)
        assert all(torch.equal(now, then) for now, then in zip(bits_of(awake), before, strict=True))


def test_training_goes_on_as_if_nobody_had_slept(make_policy) -> None:
    """Gradients are still added up through the hooks that Megatron has set, and views still show the weights."""
    after = []
    for sleeps in (False, True):
        policy = make_policy(config_of("bf16"))
        trainer = SleepingTrainer(policy)
        for step in range(3):
            (update,) = updates_of(policy, step)
            apply(policy, update, LR)
            if sleeps:
                trainer.sleep([OPTIMIZER, TRAINER])
                trainer.wake([TRAINER, OPTIMIZER])
        after.append(bits_of(policy))
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))


def test_a_checkpoint_is_written_while_all_sleeps(awake, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("awake", "asleep")]
    for folder in folders:
        folder.mkdir()
    prepare_save(awake, 1, folders[0])()
    trainer = SleepingTrainer(awake)
    trainer.sleep([OPTIMIZER])
    write = prepare_save(awake, 1, folders[1], trainer=trainer)
    trainer.sleep([TRAINER])
    assert {*storages_of(awake)} == {0}
    write()
    ours, theirs = map(TorchDistReader, folders)
    assert {*ours.keys} == {*theirs.keys}
    assert not [key for key in ours.keys if not torch.equal(ours.read(key), theirs.read(key))]
    trainer.wake([TRAINER, OPTIMIZER])


def test_gradients_leave_the_processs_memory() -> None:
    """Of 64 million numbers: what is counted is the process's resident memory, as the system sees it."""
    from posttrain.rl.megatron_backend.model import build_policy

    arch = dataclasses.replace(TRAINED, vocab_size=64000, hidden_size=512)
    config = config_of("bf16", arch)
    initialize_single_rank(config)
    policy = build_policy(config)
    for buffer in policy.buffers:
        buffer.grad_data.fill_(1)
    of_gradients = sum(buffer.grad_data.nbytes for buffer in policy.buffers)
    assert of_gradients > 1 << 28
    trainer, process = SleepingTrainer(policy), psutil.Process()
    trainer.sleep([OPTIMIZER, TRAINER])  # from now on the place on the host is there
    trainer.wake([TRAINER, OPTIMIZER])
    for buffer in policy.buffers:
        buffer.grad_data.fill_(1)
    before = process.memory_info().rss
    trainer.sleep([OPTIMIZER])
    assert before - process.memory_info().rss > 0.9 * of_gradients
    trainer.wake([OPTIMIZER])
