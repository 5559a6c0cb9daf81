"""A rank of two that trains a small model over gloo: in its third micro-batch, rank 1 is busy for ever.

As a rank does that waits for its GPU: the other waits for its gradients.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import torch
from tests.support.megatron_layouts import make_groups, small_batches
from tests.support.megatron_single import test_config
from tests.support.tiny_checkpoint import TRAINED


def main() -> None:
    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.training.batch import make_updates
    from posttrain.rl.training.phases import PhaseClock

    class Spinning(PolicyGradient):
        called = 0

        def token_losses(self, *arguments: Any, **options: Any) -> Any:
            self.called += 1
            while self.called == 3 and os.environ["RANK"] == "1":
                pass
            return super().token_losses(*arguments, **options)

    faulthandler.register(signal.SIGUSR2)
    config = small_batches(test_config(TRAINED), 2, batch=24)
    initialize(config)
    policy = build_policy(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.02)
    policy.optimizer.reload_model_params()
    objective = Spinning(config.algorithm, 32)
    (update,) = make_updates(config, objective, make_groups(TRAINED.vocab_size, 6), int(os.environ["RANK"]))
    assert len(update.batches) > 3, "it is to spin in the midst of them"
    with PhaseClock(0).phase("train"):
        train_step.update(policy, objective, update.micro_batches(objective.needs), lr=1e-3, look=lambda _: None)


if __name__ == "__main__":
    main()
