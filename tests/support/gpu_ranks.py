"""A rank of the tests that one runs first on a machine with GPUs; the same code runs on CPUs.

    python tests/support/gpu_ranks.py '{"work": "update", "device": "cuda", ...}'

prints what rank 0 knows as its last line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.hub_tensors import fill
from tests.support.megatron_layouts import flat, gathered_logprobs, make_groups, small_batches
from tests.support.megatron_single import CONFIG_DIR, test_config
from tests.support.tiny_checkpoint import TRAINED

from posttrain.config.schema import Config
from posttrain.planner.resolve import resolve

LEARNING_RATE = 1e-3


def main() -> None:
    """Do what is asked."""
    order = json.loads(sys.argv[1])
    told = {"update": update, "memory": memory}[order["work"]](order)
    print("\n" + json.dumps(told), flush=True)


def update(order: dict[str, Any]) -> dict[str, Any]:
    """Make an update of the tests' small GLM-5, and tell log-probabilities before and after it.

    Args:
        order: device, ranks, parallel, params_dtype, checkpoint.
    """
    from megatron.core import parallel_state

    from posttrain.algorithm.policy_gradient import PolicyGradient
    from posttrain.megatron_backend import train_step
    from posttrain.megatron_backend.weights import HubWeights
    from posttrain.training.batch import make_updates

    config = on_device(small_batches(test_config(TRAINED, **order["parallel"]), order["ranks"]), order["device"])
    trainer = dataclasses.replace(config.trainer, params_dtype=order["params_dtype"])
    policy = begin(config := dataclasses.replace(config, trainer=trainer))
    files = Path(order["checkpoint"]).glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    fill(HubWeights(policy.chunks, TRAINED), tensors)
    policy.optimizer.reload_model_params()
    objective, groups = PolicyGradient(config.algorithm, 32), make_groups(TRAINED.vocab_size)
    (made,) = make_updates(config, objective, groups, parallel_state.get_data_parallel_rank())
    made = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
    statistics = train_step.update(policy, objective, made.micro_batches(objective.needs), LEARNING_RATE)
    after = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
    return {"before": gathered_logprobs(made), "after": gathered_logprobs(after), "statistics": flat(statistics)}


def memory(order: dict[str, Any]) -> dict[str, Any]:
    """Make two steps on rows as full as there can be, and tell each phase's peak beside the plan's.

    Args:
        order: request, of a configuration.
    """
    from posttrain.algorithm.policy_gradient import PolicyGradient
    from posttrain.megatron_backend import train_step
    from posttrain.planner.sizing.memory_phases import phase_memory
    from posttrain.rehearsal.outcome import UNSEEN
    from posttrain.rehearsal.samples import MadeUpRollouts, shortened
    from posttrain.training.batch import make_updates
    from posttrain.training.phases import PhaseClock

    config = shortened(resolve(order["request"], CONFIG_DIR).config)
    policy, clock = begin(config), PhaseClock()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.02)
    policy.optimizer.reload_model_params()
    objective = PolicyGradient(config.algorithm, config.rollout.max_response_tokens)
    for step in range(2):
        (made,) = make_updates(config, objective, MadeUpRollouts(config).of_step(step).groups, 0)
        with clock.phase("old_logprobs"):
            made = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
        with clock.phase("train"):
            train_step.update(policy, objective, made.micro_batches(objective.needs), LEARNING_RATE)
    parts = {row.phase: row.gpu for row in phase_memory(config) if row.stage == 0}
    # What a phase that sleeps would free is held: nothing of the trainer sleeps yet.
    parts["old_logprobs"] = {**parts["train"], **parts["old_logprobs"]}
    return {
        name: {
            "peak_gib": peak,
            "planned_gib": sum(size for part, size in parts[name].items() if part not in UNSEEN),
            "reserve_gib": sum(parts[name].get(part, 0.0) for part in ("reserve", "fragmentation")),
        }
        for name, peak in clock.peak_gib.items()
    }


def on_device(config: Config, device: str) -> Config:
    """Return a test's configuration for GPUs; DeepEP, which needs more of a machine, is tried by the recipes."""
    return dataclasses.replace(
        config,
        hardware=dataclasses.replace(config.hardware, device=device),
        trainer=dataclasses.replace(config.trainer, deepep=False),
    )


def begin(config: Config) -> Any:
    """Join the others, and return the policy."""
    from posttrain.megatron_backend.initialize import initialize
    from posttrain.megatron_backend.model import build_policy

    initialize(config)
    return build_policy(config)


if __name__ == "__main__":
    main()
