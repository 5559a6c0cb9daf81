"""Predicted gain of a step from speculation with the model's MTP layer, by phase of the rollout."""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.config.derived import is_off_policy, uses_engines
from posttrain.config.queue_rules import HOLDING
from posttrain.config.schema import Config
from posttrain.plan.timing.decoding import accepted_tokens, running_share, speculation_gain
from posttrain.plan.timing.rates import MOST_SPECULATION_GAIN
from posttrain.plan.timing.rollout_of_step import engine_of, workload
from posttrain.plan.timing.step_time import step_durations

# Number of drafts in recipes with speculation (`config/nodes/glm5_32.yaml`), if the configuration has none.
DRAFTS = 3
# Fractions of the longest response at which the gain is shown; at the end each engine has one request left.
SHOWN = {"all requests": 0.0, "half of the longest response": 0.5, "the last request": 1.0}


def speculation_part(config: Config, shared_storage: float) -> dict[str, Any] | None:
    """Return the gain of speculation for `plan.json`; None if no engine can draft, or may (`config.queue_rules`).

    Args:
        config: The resolved configuration.
        shared_storage: Bytes per second of shared storage.

    Returns:
        "is_on", "drafts" per step, "accepted" (a request's tokens per step), "most_gain" of a rollout, seconds of
        rollout and step "without" and "with" it, and "phases" of the rollout, each with "requests" of an engine and its
        "gain" without the limit.
    """
    has_drafts = config.model.architecture.num_nextn_predict_layers and config.hardware.kernels.speculative
    if (
        (is_off_policy(config) and config.rollout.on_new_weights in HOLDING)
        or not (has_drafts and uses_engines(config))
        or config.hardware.device == "cpu"
        or config.engine.kind != "sglang"
    ):
        return None
    drafts, work = config.engine.mtp_steps or DRAFTS, workload(config)
    requests = work.num_samples / config.engine.num_engines
    drafting = engine_of(_with_drafts(config, drafts))
    phases = [
        {
            "phase": name,
            "requests": round(running := max(requests * running_share(x, work.mean_share), 1.0)),
            "gain": round(speculation_gain(drafting, running, work.prompt_tokens + x * work.longest_response), 3),
        }
        for name, x in SHOWN.items()
    ]
    return {
        "is_on": config.engine.mtp_steps > 0,
        "drafts": drafts,
        "accepted": round(accepted_tokens(drafts), 2),
        "most_gain": MOST_SPECULATION_GAIN,
        "without": _seconds(_with_drafts(config, 0), shared_storage),
        "with": _seconds(_with_drafts(config, drafts), shared_storage),
        "phases": phases,
    }


def _with_drafts(config: Config, drafts: int) -> Config:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, mtp_steps=drafts))


def _seconds(config: Config, shared_storage: float) -> dict[str, float]:
    seconds = step_durations(config, shared_storage)
    return {"rollout": seconds["step_rollout"], "step": seconds["step"]}
