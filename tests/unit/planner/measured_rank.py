"""One rank of several small configurations: trains an update in each, prints what it holds as JSON.

Sizes are those of tensor storages: parameters and buffers of modules, Megatron's gradient buffers, the optimizer's
state, and what autograd saves in the first micro-batch (saved-tensor hooks). The process's resident memory says nothing
at this size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from posttrain.config.schema import Architecture, Config
from posttrain.planner.activations import MicroBatch


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    print(json.dumps([measure(case_config(case)) for case in request["cases"]]))


def case_config(case: dict) -> Config:
    """Return the tiny model's configuration with a case's layout and trainer settings."""
    from tests.megatron_layouts import small_batches
    from tests.megatron_single import test_config
    from tests.tiny_checkpoint import TINY

    shape = {"num_hidden_layers": 4, "n_routed_experts": 8, **case.get("architecture", {})}
    architecture: Architecture = dataclasses.replace(TINY, **shape)
    config = small_batches(test_config(architecture, **case.get("parallel", {})), case["ranks"])
    trainer = dataclasses.replace(config.trainer, log_probs_chunk_size=32, **case.get("trainer", {}))
    return dataclasses.replace(config, trainer=trainer)


def measure(config: Config) -> dict[str, object]:
    """Return the bytes that this rank holds after one update, and its place in the layout."""
    from megatron.core import parallel_state
    from tests.megatron_layouts import make_groups

    from posttrain.megatron_backend import train_step
    from posttrain.megatron_backend.initialize import initialize, shut_down
    from posttrain.megatron_backend.model import build_policy
    from posttrain.training.batch import make_updates

    # The next configuration meets at another port: the last one's store may linger.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    initialize(config)
    policy = build_policy(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.model.parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
    policy.optimizer.reload_model_params()
    groups = make_groups(config.model.architecture.vocab_size)
    (update,) = make_updates(config, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    saved = _SavedTensors(policy)
    train_step.update(policy, update.micro_batches(), lr=1e-4)
    buffers = [*policy.wrapped.buffers, *policy.wrapped.expert_parallel_buffers]
    lengths = (update.batches[0].cu_seqlens[1:] - update.batches[0].cu_seqlens[:-1]).tolist()
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": storage_bytes([*policy.model.parameters(), *policy.model.buffers()]),
        "gradients": storage_bytes(buffer.grad_data for buffer in buffers),
        "optimizer": storage_bytes(optimizer_tensors(policy.optimizer)),
        "activations": saved.num_bytes,
        "gathered_state": storage_bytes(gathered_tensors(policy)),
        "batch": dataclasses.asdict(MicroBatch(sum(lengths), len(lengths), max(lengths))),
    }
    shut_down()
    return result


class _SavedTensors:
    """Adds up what autograd saves while the first micro-batch runs forward; weights are not counted."""

    def __init__(self, policy) -> None:
        self.num_bytes = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
        self._seen: dict[int, torch.Tensor] = {}
        forward = policy.wrapped.forward

        def first_forward(*args, **kwargs):
            policy.wrapped.forward = forward
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                output = forward(*args, **kwargs)
            self.num_bytes = storage_bytes(self._seen.values())
            self._seen.clear()
            return output

        policy.wrapped.forward = first_forward

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._weights:
            # Held until the pass ends, so that no other tensor gets the same place.
            self._seen[place] = tensor
        return tensor


def optimizer_tensors(optimizer) -> Iterator[torch.Tensor]:
    """Yield moments and, where they are not the weights themselves, the FP32 master copies."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        for group in part.shard_fp32_from_float16_groups:
            yield from group


def gathered_tensors(policy) -> list[torch.Tensor]:
    """Return the optimizer's tensors as a save hands them to the writer, which is not called."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from posttrain.megatron_backend import checkpoint

    found: dict = {}
    save = checkpoint.dist_checkpointing.save
    checkpoint.dist_checkpointing.save = lambda state, *_, **__: found.update(state)
    try:
        checkpoint.save_training_state(policy, 1, Path())
    finally:
        checkpoint.dist_checkpointing.save = save
    values = (getattr(value, "data", None) for value in nested_values(found["optimizer"]))
    return [value for value in values if torch.is_tensor(value)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the different storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
