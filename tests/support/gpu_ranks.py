"""A rank of the tests that one runs first on a machine with GPUs; the same code runs on CPUs.

    python tests/support/gpu_ranks.py '{"work": "update", "device": "cuda", ...}'

prints what rank 0 knows as its last line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.hub_tensors import fill
from tests.support.megatron_layouts import flat, gathered_logprobs, make_groups, small_batches
from tests.support.megatron_single import CONFIG_DIR, test_config
from tests.support.replayed_routes import replaying, routed
from tests.support.tiny_checkpoint import TRAINED

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve

LEARNING_RATE = 1e-3


def main() -> None:
    """Do what is asked."""
    order = json.loads(sys.argv[1])
    told = {"update": update, "steps": steps}[order["work"]](order)
    print("\n" + json.dumps(told), flush=True)


def update(order: dict[str, Any]) -> dict[str, Any]:
    """Make an update of the tests' small GLM-5, and tell log-probabilities before and after it.

    Args:
        order: device, ranks, parallel, params_dtype, checkpoint; routes, a folder for them where they are told.
    """
    from megatron.core import parallel_state

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    config = on_device(small_batches(test_config(TRAINED, **order["parallel"]), order["ranks"]), order["device"])
    trainer = dataclasses.replace(config.trainer, params_dtype=order["params_dtype"])
    config = dataclasses.replace(config, trainer=trainer)
    groups = make_groups(TRAINED.vocab_size)
    if "routes" in order:
        config, groups = replaying(config), routed(groups, TRAINED, Path(order["routes"]))
    policy = begin(config)
    files = Path(order["checkpoint"]).glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    fill(HubWeights(policy.chunks, TRAINED), tensors)
    policy.optimizer.reload_model_params()
    objective = PolicyGradient(config.algorithm, 32)
    (made,) = make_updates(config, objective, groups, parallel_state.get_data_parallel_rank())
    made = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
    statistics = train_step.update(policy, objective, made.micro_batches(objective.needs), LEARNING_RATE)
    after = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
    return {"before": gathered_logprobs(made), "after": gathered_logprobs(after), "statistics": flat(statistics)}


def steps(order: dict[str, Any]) -> dict[str, Any]:
    """Make steps on rows as full as there can be, and tell each phase's peak and the last one's time beside the plan's.

    The first has shorter rows: it makes the optimizer's state. The second compiles what the third runs. As beside
    engines, whoever a phase does not need sleeps.

    Args:
        order: device, request, of a configuration.
    """
    from posttrain.plan.sizing.memory import GIB
    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.sleep import SleepingTrainer
    from posttrain.rl.training.batch import make_updates
    from posttrain.rl.training.colocation import Colocation
    from posttrain.rl.training.phases import PhaseClock
    from posttrain_rehearsal.samples import MadeUpRollouts, shortened

    config = shortened(resolve(order["request"], CONFIG_DIR).config)
    policy = begin(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.02)
    policy.optimizer.reload_model_params()
    objective = PolicyGradient(config.algorithm, config.rollout.max_response_tokens)
    peaks: Counter[str] = Counter()
    turns = Colocation(SleepingTrainer(policy), NoEngines(), lambda: None)
    for step in (1, 2, 3):
        groups = MadeUpRollouts(config).of_step(step).groups
        lengths = [sample.num_tokens for group in groups for sample in group.trajectories]
        (made,), clock = make_updates(config, objective, groups, 0), PhaseClock(step, turns.enter)
        with clock.phase("old_logprobs"):
            made = made.with_old_logprobs(train_step.compute_logprobs(policy, made.batches))
        with clock.phase("train"):
            train_step.update(policy, objective, made.micro_batches(objective.needs), LEARNING_RATE)
        with clock.phase("save"):
            asleep_gib = bytes_in_use() / GIB
        peaks |= Counter(clock.peak_gib)
    return beside_the_plan(config, peaks, clock, asleep_gib, lengths)


def beside_the_plan(config: Config, peaks: Counter[str], clock: Any, asleep_gib: float, lengths: list[int]) -> Any:
    """Return what was measured of the last step, and what the plan says of it."""
    from posttrain.plan.sizing.memory_phases import phase_memory
    from posttrain.plan.timing.step_time import optimizer_seconds, trainer_of
    from posttrain.plan.timing.update_time import forward_causes, train_causes
    from posttrain.rl.training.utilisation import model_flops_utilisation
    from posttrain_rehearsal.outcome import UNSEEN

    trainer, mean = trainer_of(config), sum(lengths) / len(lengths)
    planned = {
        "old_logprobs": forward_causes(trainer, len(lengths), mean),
        "train": train_causes(trainer, len(lengths), mean) | {"optimizer": optimizer_seconds(config)},
    }
    rows = {row.phase: row for row in phase_memory(config) if row.stage == 0}
    parts = {name: row.gpu for name, row in rows.items()}
    moved = sum(size for part, size in rows["save"].host.items() if part.startswith("sleeping"))
    asleep = {"gib": asleep_gib, "moved_gib": moved, "seconds": clock.seconds["asleep"]}
    return {"asleep": asleep} | {
        name: {
            "peak_gib": peak,
            "planned_gib": sum(size for part, size in parts[name].items() if part not in UNSEEN),
            "reserve_gib": sum(parts[name].get(part, 0.0) for part in ("reserve", "fragmentation")),
            "seconds": clock.seconds[name],
            "planned_seconds": planned[name],
            "mfu": model_flops_utilisation(config, lengths, clock.seconds[name]),
        }
        for name, peak in peaks.items()
        if name in planned
    }


class NoEngines:
    """Nobody to take turns with."""

    def sleep(self, parts: Iterable[str]) -> None:
        """Do nothing."""

    def wake(self, parts: Iterable[str]) -> None:
        """Do nothing."""


def bytes_in_use() -> int:
    """Return what the allocator has from the device, used or not."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def on_device(config: Config, device: str) -> Config:
    """Return a test's configuration for GPUs; DeepEP, which needs more of a machine, is tried by the recipes."""
    return dataclasses.replace(
        config,
        hardware=dataclasses.replace(config.hardware, device=device),
        trainer=dataclasses.replace(config.trainer, deepep=False),
    )


def begin(config: Config) -> Any:
    """Join the others, and return the policy."""
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy

    initialize(config)
    return build_policy(config)


if __name__ == "__main__":
    main()
