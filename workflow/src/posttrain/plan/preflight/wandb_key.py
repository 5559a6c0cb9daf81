"""Checks that Weights & Biases has its key, without importing the library, because dry runs check it."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.plan.preflight.report import Finding, failed, ok
from posttrain.report.wandb_login import login_of_wandb


def check_wandb(config: Config) -> Finding:
    """Check that W&B has its key if it is online. The key itself is never shown."""
    if not config.logging.wandb or config.logging.wandb_mode == "offline":
        return ok("W&B", "offline" if config.logging.wandb else "off")
    if found := login_of_wandb():
        return ok("W&B", f"online, the key is in {found}")
    remedy = "`wandb login`, set WANDB_API_KEY in the environment, or set='logging.wandb_mode=offline'"
    return failed("secret-not-set", "W&B", "logging.wandb_mode", "online without a key", "a key of W&B", remedy)
