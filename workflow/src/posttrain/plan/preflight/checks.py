"""All checks before work starts, run together."""

from __future__ import annotations

from posttrain.config.rules import check_trainable
from posttrain.plan.preflight.lm_eval import check_lm_eval
from posttrain.plan.preflight.machine import (
    check_broadcast,
    check_devices,
    check_engine_interpreter,
    check_image,
    check_open_files,
    check_ports,
    check_versions,
)
from posttrain.plan.preflight.report import Finding, skipped
from posttrain.plan.preflight.reward_tokens import check_reward_tokens
from posttrain.plan.preflight.sandbox import check_sandbox
from posttrain.plan.preflight.scheduler import check_scheduler
from posttrain.plan.preflight.services import check_hub_sources
from posttrain.plan.preflight.storage import check_storage
from posttrain.plan.preflight.wandb_key import check_wandb
from posttrain.store import Paths


def check_everything(paths: Paths) -> list[Finding]:
    """Return the findings of all checks for one run.

    Args:
        paths: Paths of the run, with its resolved configuration.
    """
    config = paths.resolved.config
    return [
        *(Finding(problem.key, str(problem), problem) for problem in check_trainable(config)),
        *check_storage(paths),
        *check_scheduler(config),
        check_devices(config),
        check_open_files(config) if config.site.launcher == "local" else skipped("open files", "each node looks"),
        check_engine_interpreter(config),
        check_lm_eval(config),
        check_versions(config),
        check_image(config),
        check_broadcast(config),
        *check_ports(config),
        *check_hub_sources(paths),
        check_wandb(config),
        *check_reward_tokens(config),
        check_sandbox(config),
    ]
