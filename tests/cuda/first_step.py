"""Builds a model as a first run on GPUs does, on fake CUDA, asks for its weights, and differentiates a loss."""

from __future__ import annotations

import json
import sys

import torch
from tests.support.fake_cuda import join_fake_ranks, provide_transformer_engine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

provide_transformer_engine()


def main() -> None:
    from tests.support.megatron_single import CONFIG_DIR

    from posttrain.config.derived import world_size
    from posttrain.planner.resolve import resolve

    config = resolve({"site": "local", **json.loads(sys.argv[1])}, CONFIG_DIR).config
    join_fake_ranks(world_size(config))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(config)
    # Which tokens are a response's is a question of values: sizes stay open here.
    with FakeTensorMode(shape_env=ShapeEnv()):
        print(json.dumps({**model, **gradient_of(config)}))


def model_of(config) -> dict[str, object]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from posttrain.megatron_backend import weights
    from posttrain.megatron_backend.initialize import initialize
    from posttrain.megatron_backend.model import build_model

    initialize(config)
    (model,) = build_model(config)
    # The other ranks' answers do not come.
    weights.gather_plain = lambda mine: [json.loads(json.dumps(mine))]
    norms = {name: part for name, part in model.named_modules() if "layernorm" in name and hasattr(part, "weight")}
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    fused = [getattr(module, "fuse_wgrad_accumulation", None) for module in model.modules()]
    return {
        "fused": sorted({bool(value) for value in fused if value is not None}),
        "names": weights.HubWeights([model], config.model.architecture).names,
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "extra_states": sum("_extra_state" in key for key in model.sharded_state_dict()),
        "norms": sorted({type(norm).__module__ for norm in norms.values()}),
        "latent_eps": sorted(
            {norm.eps for name, norm in norms.items() if name.endswith((".q_layernorm", ".kv_layernorm"))}
        ),
        "experts": sorted({type(layer.experts).__name__ for layer in layers}),
        "dispatchers": sorted({type(layer.token_dispatcher).__name__ for layer in layers}),
    }


def gradient_of(config) -> dict[str, object]:
    """Differentiate the loss of a micro-batch that came from the host, as `train_step` does."""
    from posttrain.algorithm.objective import TokenBatch
    from posttrain.algorithm.policy_gradient import PolicyGradient
    from posttrain.megatron_backend.train_step import _loss

    objective = PolicyGradient(config.algorithm, config.rollout.max_response_tokens)
    row = torch.ones(6)
    batch = TokenBatch((4, 2), row > 0, row, row, row, row)
    answers = torch.ones(2, 6, device="cuda:0", requires_grad=True)
    loss, _, (_, sums) = _loss(answers, batch, objective)
    loss.backward()
    return {"gradient": answers.grad.device.type, "sums": sums.device.type}


if __name__ == "__main__":
    main()
