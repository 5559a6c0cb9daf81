"""Samples whose tokens went to experts drawn by chance, and gangs of ranks that train on them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.support.hub_tensors import fill

from posttrain.config.schema import Architecture, Config
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import TrajectoryGroup


def routed(groups: Sequence[TrajectoryGroup], arch: Architecture, folder: Path, seed: int = 5) -> list[TrajectoryGroup]:
    """Return the groups with routes that no router would choose, from a file in a folder."""
    samples = [sample for group in groups for sample in group.trajectories]
    generator = np.random.default_rng(seed)
    routes = RolloutStore(folder).write_routes(0, 0, [[draw(generator, arch, s.num_tokens - 1)] for s in samples])
    told = iter(routes)
    return [
        dataclasses.replace(
            group, trajectories=tuple(dataclasses.replace(s, routes=next(told)) for s in group.trajectories)
        )
        for group in groups
    ]


def draw(generator: np.random.Generator, arch: Architecture, num_tokens: int) -> np.ndarray:
    """Return [tokens, layers with experts, experts of a token], no expert twice."""
    layers = arch.num_hidden_layers - arch.first_k_dense_replace
    order = generator.random((num_tokens, layers, arch.n_routed_experts)).argsort(-1)
    return order[..., : arch.num_experts_per_tok].astype(np.uint8)


def replaying(config: Config) -> Config:
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, routing_replay=True))


def main() -> None:
    """Make one gang after the other; each rank leaves its result in its gang's folder."""
    order = json.loads(sys.argv[1])
    from tests.support.megatron_single import run_forked

    for request in order["requests"]:
        folder = Path(request["folder"])
        run_forked(request["ranks"], folder / "meeting", partial(run_rank, request, folder))


def run_rank(request: dict[str, Any], folder: Path) -> None:
    from tests.support.megatron_layouts import small_batches
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TRAINED

    config = replaying(small_batches(test_config(TRAINED, **request["parallel"]), request["ranks"]))
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **request["trainer"]))
    result = run(config, Path(request["checkpoint"]), folder / "rollouts" / os.environ["RANK"])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def run(config: Config, checkpoint: Path, folder: Path) -> dict[str, object]:
    from megatron.core import parallel_state
    from tests.support.megatron_layouts import flat, gathered_logprobs, make_groups

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    initialize(config)
    policy, arch = build_policy(config), config.model.architecture
    weights = HubWeights(policy.chunks, arch)
    fill(weights, {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()})
    policy.optimizer.reload_model_params()
    objective = PolicyGradient(config.algorithm, 32)
    groups = routed(make_groups(arch.vocab_size), arch, folder)
    (update,) = make_updates(config, objective, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    logprobs = gathered_logprobs(update)
    statistics = [train_step.update(policy, objective, update.micro_batches(objective.needs), lr=1e-3) for _ in "ab"]
    ended = dict(weights.gather(dtype=torch.float32))
    kept = sum(len(replay.replay_backward_list) for replay in replays(policy))
    norms = {name: float(t.double().norm()) for name, t in ended.items() if t is not None}
    return {"logprobs": logprobs, "statistics": list(map(flat, statistics)), "norms": norms, "kept": kept}


def replays(policy) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [part for chunk in policy.chunks for part in chunk.modules() if isinstance(part, TopKRouter)]
    return [router.router_replay for router in routers]


if __name__ == "__main__":
    main()
