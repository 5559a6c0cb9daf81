"""Probes every service and judge of `data.reward` for reachability and access before a job uses GPUs."""

from __future__ import annotations

import asyncio
import dataclasses

from posttrain.config.schema import Config
from posttrain.config.service_rules import addresses
from posttrain.errors import ConfigError
from posttrain.plan.preflight.report import Finding, failed, ok, skipped
from posttrain.rl.reward.judge import JudgeGrader
from posttrain.rl.reward.scoring import network_grader
from posttrain.rl.reward.service import ServiceGrader

ALLOWED = {
    ServiceGrader: "an address that answers as docs/rewards.md says, with [] to no answers",
    JudgeGrader: "an address that ends in /v1, and at it /chat/completions with this model",
}


def check_addresses(config: Config) -> list[Finding]:
    """Return each probe's result; skips those without a token (`check_reward_tokens` reports them)."""
    findings = []
    for section, name, address in addresses(config, only_used=True):
        where = f"{section} at {address.url}"
        try:
            grader = network_grader(config, name, dataclasses.replace(address, num_retries=0))
        except ConfigError as error:
            findings.append(skipped(where, error.problems[0].value))
            continue
        if failure := asyncio.run(grader.probe()):
            value, allowed = f"{address.url}: {failure.kind}: {failure.reason}", ALLOWED[type(grader)]
            findings.append(
                failed("service-unusable", where, f"{section}.url", value, allowed, f"start it, or correct {section}")
            )
        else:
            findings.append(ok(where, "answers"))
    return findings
