"""One rank of several small configurations: trains an update in each, prints what it holds as JSON.

Sizes are those of tensor storages: parameters and buffers of modules, Megatron's gradient buffers, the optimizer's
state, what autograd saves in the first micro-batch (saved-tensor hooks), and what a save adds. The process's resident
memory says nothing at this size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.config.schema import Architecture, Config
from posttrain.plan.sizing.activations import MicroBatch


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    print(json.dumps([measure(case_config(case)) for case in request["cases"]]))


def case_config(case: dict) -> Config:
    """Return the tiny model's configuration with a case's layout and trainer settings."""
    from tests.support.megatron_layouts import small_batches
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TINY

    shape = {"num_hidden_layers": 4, "n_routed_experts": 8, **case.get("architecture", {})}
    architecture: Architecture = dataclasses.replace(TINY, **shape)
    config = small_batches(test_config(architecture, **case.get("parallel", {})), case["ranks"])
    trainer = dataclasses.replace(config.trainer, log_probs_chunk_size=32, **case.get("trainer", {}))
    return dataclasses.replace(config, trainer=trainer)


def measure(config: Config) -> dict[str, object]:
    """Return the bytes that this rank holds after one update, and its place in the layout."""
    from megatron.core import parallel_state
    from tests.support.megatron_layouts import make_groups, optimizer_tensors
    from tests.support.megatron_single import accumulate_gradients_apart

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.initialize import initialize, shut_down
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.training.batch import make_updates

    # The next configuration meets at another port: the last one's store may linger.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    initialize(config)
    policy = build_policy(config)
    for chunk in policy.chunks:
        accumulate_gradients_apart(chunk)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
    policy.optimizer.reload_model_params()
    groups = make_groups(config.model.architecture.vocab_size)
    grpo = PolicyGradient(config.algorithm, config.rollout.max_response_tokens)
    (update,) = make_updates(config, grpo, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    saved = _SavedTensors(policy)
    train_step.update(policy, grpo, update.micro_batches(grpo.needs), lr=1e-4)
    lengths = (update.batches[0].cu_seqlens[1:] - update.batches[0].cu_seqlens[:-1]).tolist()
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": storage_bytes(
            [*policy.parameters(), *(buffer for chunk in policy.chunks for buffer in chunk.buffers())]
        ),
        "gradients": storage_bytes(buffer.grad_data for buffer in policy.buffers),
        "optimizer": storage_bytes(optimizer_tensors(policy.optimizer)),
        "activations": saved.num_bytes,
        "save_staging": staged_by_a_save(policy),
        "batch": dataclasses.asdict(MicroBatch(sum(lengths), len(lengths), max(lengths))),
        "prompt_tokens": int((update.batches[0].loss_mask == 0).sum()),
    }
    shut_down()
    return result


class _SavedTensors:
    """Adds up what autograd saves while the first micro-batch runs forward; weights are not counted."""

    def __init__(self, policy) -> None:
        self.num_bytes = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
        self._seen: dict[int, torch.Tensor] = {}
        forward = policy.wrapped[0].forward

        def first_forward(*args, **kwargs):
            policy.wrapped[0].forward = forward
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                output = forward(*args, **kwargs)
            kept_choices = kwargs["packed_seq_params"].choices.values()
            self.num_bytes = storage_bytes([*self._seen.values(), *kept_choices])
            self._seen.clear()
            return output

        policy.wrapped[0].forward = first_forward

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._weights:
            # Held until the pass ends, so that no other tensor gets the same place.
            self._seen[place] = tensor
        return tensor


def staged_by_a_save(policy) -> int:
    """Return the most bytes of weights and state that a save has beside those that lie there anyway."""
    from posttrain.rl.megatron_backend.checkpoint import prepare_save

    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        with _PeakOfNew() as new:
            prepare_save(policy, 1, Path(shared[0]))()
    return new.peak


class _PeakOfNew(TorchDispatchMode):
    """Adds up floating-point storages that operations make, for as long as each of them lives.

    What ranks tell each other about their tensors are bytes, not numbers, and left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._held = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {place(tensor) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.is_floating_point() and place(tensor) not in old:
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, num_bytes: int) -> None:
        self._held -= num_bytes


def place(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the different storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
