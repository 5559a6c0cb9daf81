"""One rank of four: the product's own updates of a sparse model where ranks share sequences, in some layouts.

Prints JSON: layout -> log-probabilities before by the samples' numbers, and what the updates said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from posttrain.config.schema import Config
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

# (prompt, response): odd; shorter than two chunks a rank; longer than the indexer's top-k.
LENGTHS = ((1, 1), (2, 1), (9, 28), (41, 22), (1, 4), (16, 17))


def make_groups(vocab_size: int) -> list[TrajectoryGroup]:
    """Return one group a length, of three samples."""
    generator, groups = torch.Generator().manual_seed(11), []
    for prompt_id, sizes in enumerate(LENGTHS):
        samples = []
        for place in range(3):
            prompt, response = (
                tuple(torch.randint(2, vocab_size, (size,), generator=generator).tolist()) for size in sizes
            )
            logprobs = (-4.0,) * len(response)
            samples.append(
                Trajectory.of_response(
                    prompt, response, logprobs, 0, prompt_id=prompt_id, sample_index=place, reward=float(place)
                )
            )
        groups.append(TrajectoryGroup(Prompt(prompt_id, (), ""), tuple(samples)))
    return groups


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    from tests.support.chosen_keys import reference_kernel
    from tests.support.family_updates import lay_out

    found = {}
    for layout, parallel in request["layouts"].items():
        config = small_batches(parallel, request["ranks"])
        lay_out(config)
        kernel = reference_kernel if request.get("by_kernel") else None
        found[layout] = updated(config, Path(request["checkpoint"]), kernel)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def small_batches(parallel: dict[str, int], num_ranks: int) -> Config:
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TRAINED

    config = test_config(TRAINED, **parallel)
    changes = {
        # Every sample of more than 30 tokens is a micro-batch of its own.
        "trainer": {"max_tokens_per_gpu": 60 // config.parallel.context_parallel_size},
        "training": {"global_batch_size": len(LENGTHS) * 3},
        "hardware": {"gpus_per_node": num_ranks},
        # Joins tokens that different ranks have.
        "algorithm": {"ratio_level": "sequence"},
    }
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **changed)


def updated(config: Config, checkpoint: Path, kernel: Any = None) -> dict[str, object]:
    """Make two updates as the trainer does, of which the second has other micro-batches; sparse layers by a kernel."""
    from megatron.core import parallel_state
    from tests.support.chosen_keys import attend_by
    from tests.support.hub_tensors import fill
    from tests.support.megatron_layouts import flat, gathered_logprobs, update_on

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    policy = build_policy(config)
    if kernel:
        attend_by(kernel, policy.chunks)
    weights = HubWeights(policy.chunks, config.model.architecture)
    tensors = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    fill(weights, tensors)
    policy.optimizer.reload_model_params()
    objective = PolicyGradient(config.algorithm, 32)
    groups = make_groups(config.model.architecture.vocab_size)
    (update,) = make_updates(config, objective, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    first = flat(train_step.update(policy, objective, update.micro_batches(objective.needs), lr=1e-4, is_last=False))
    # Three micro-batches: of two data-parallel ranks, one has nothing to do in its second.
    last = flat(update_on(policy, objective, groups[-1:], is_last=True))
    mine = make_updates(config, objective, groups[-1:], parallel_state.get_data_parallel_rank())[0].batches
    everybody: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everybody, sum(not batch.trajectory_indices for batch in mine))
    shortest = min(length for batch in update.batches for length in batch.lengths)
    said = {"first": first, "last": last, "empty": max(everybody), "shortest": shortest}
    said["weights"] = digest(dict(weights.gather(dtype=torch.float32)))
    return said | {"logprobs": gathered_logprobs(update)}


def digest(tensors: Mapping[str, torch.Tensor | None]) -> str:
    """Return the SHA-256 of tensors in the order of their names; ranks but the first have none."""
    found = hashlib.sha256()
    for name in sorted(name for name, tensor in tensors.items() if tensor is not None):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
