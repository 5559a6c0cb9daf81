"""Tokens that go where an engine has sent them, against transformers' model whose routers are told the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.independent_grpo import IndependentGrpo, advantages
from tests.support.megatron_single import run_gangs
from tests.support.replayed_routes import replaying, replays, routed
from tests.support.small_updates import LR, SETTINGS, apply, objective_of, rollout, trained_config, weights_of
from tests.support.tiny_checkpoint import TRAINED

LAYOUTS = {
    "one_rank": {},
    "tensor_and_expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}


class ToldRouters:
    """Has the routers of transformers' model choose what they are told, and weigh it as they weigh their own choice."""

    def __init__(self, model):
        self.routes: np.ndarray = np.zeros(0)
        for place, layer in enumerate(model.model.layers[TRAINED.first_k_dense_replace :]):
            layer.mlp.gate.forward = self._forward(layer.mlp.gate, place)

    def _forward(self, gate, place: int):
        def forward(hidden: torch.Tensor):
            logits = hidden.reshape(-1, TRAINED.hidden_size).float() @ gate.weight.float().T
            # The last token's choice matters to nobody.
            told = np.concatenate([self.routes[place], self.routes[place, :1]])
            chosen = torch.from_numpy(told.astype(np.int64))
            weights = logits.sigmoid().gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) * TRAINED.routed_scaling_factor, chosen

        return forward


class ToldGrpo(IndependentGrpo):
    """Tells the routers of each sample's tokens before its forward pass."""

    def __init__(self, model, samples):
        self._routers = ToldRouters(model)
        self._routes = {s.tokens: read(*s.routes) for s in samples}
        super().__init__(model, SETTINGS)

    def _distributions(self, tokens, mask) -> torch.Tensor:
        self._routers.routes = self._routes[tokens]
        return super()._distributions(tokens, mask)


def read(routes) -> np.ndarray:
    return np.memmap(routes.file, routes.dtype, "r", routes.offset, routes.shape)


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_an_update_equals_that_of_routers_that_are_told(
    make_policy, make_reference, tmp_path: Path, recompute: str
) -> None:
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    config = replaying(trained_config())
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, recompute_granularity=recompute))
    policy = make_policy(config)
    groups = routed(rollout(0), TRAINED, tmp_path)
    update = make_updates(config, objective_of(policy), groups, dp_rank=0)[0]
    ours = train_step.compute_logprobs(policy, update.batches)
    reference = ToldGrpo(make_reference(), update.trajectories)
    with torch.no_grad():
        theirs = [reference.logprobs(s.tokens, s.loss_mask) for s in update.trajectories]
    for batch, row in zip(update.batches, ours, strict=True):
        for index, values in batch.response_values(row).items():
            assert (values - theirs[index]).abs().max() <= 1e-5

    before = reference.weights()
    said = apply(policy, update.with_old_logprobs(ours), LR)
    values = advantages([[sample.reward for sample in group.trajectories] for group in groups])
    expected = reference.update(update.trajectories, theirs, values[: len(update.trajectories)], LR)
    assert said.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert said.loss == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    after = reference.weights()
    gates = [name for name in after if name.endswith("mlp.gate.weight")]
    moved = weights_of(policy)
    for name in gates:
        error = (moved[name] - after[name]).norm()
        assert error <= 1e-4 * (after[name] - before[name]).norm() + 1e-7 * before[name].norm(), name
    assert len(gates) == TRAINED.num_hidden_layers - TRAINED.first_k_dense_replace
    assert not any(replay.replay_backward_list for replay in replays(policy)), "nothing of a pass is kept"


def test_routers_choose_otherwise_when_nobody_tells_them(make_policy, tmp_path: Path) -> None:
    """Or these tests would see nothing."""
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    told, free = make_policy(replaying(trained_config())), make_policy(trained_config())
    update = make_updates(free.config, objective_of(free), routed(rollout(0), TRAINED, tmp_path), dp_rank=0)[0]
    both = zip(*(train_step.compute_logprobs(policy, update.batches) for policy in (told, free)), strict=True)
    assert all((one - other).abs().mean() > 1e-2 for one, other in both)


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    root = tmp_path_factory.mktemp("replayed")
    for name in LAYOUTS:
        (root / name).mkdir()
    requests = [
        {
            "checkpoint": str(checkpoint[0]),
            "folder": str(root / name),
            "parallel": parallel,
            "trainer": {},
            "ranks": 1 if name == "one_rank" else 2,
        }
        for name, parallel in LAYOUTS.items()
    ]
    run_gangs("replayed_routes", {"requests": requests})
    return {name: [json.loads(p.read_text()) for p in sorted((root / name).glob("[01].json"))] for name in LAYOUTS}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one_rank"])
def test_two_ranks_equal_one(results, name: str) -> None:
    (one,), ranks = results["one_rank"], results[name]
    assert one["logprobs"].keys() == ranks[0]["logprobs"].keys()
    for index, values in one["logprobs"].items():
        assert values == pytest.approx(ranks[0]["logprobs"][index], rel=1e-6, abs=1e-6)
    for rank in ranks:
        assert rank["kept"] == 0
        for expected, found in zip(one["statistics"], rank["statistics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for tensor, norm in one["norms"].items():
        assert ranks[0]["norms"][tensor] == pytest.approx(norm, rel=1e-5), tensor
