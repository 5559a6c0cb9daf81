"""Rules of rollouts that a queue hands to the trainer: staleness, and groups sampled in place of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from posttrain.config.derived import is_off_policy, takes_turns, uses_engines, uses_queue
from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]
# Values of rollout.on_new_weights with which requests, and drafts, live on while engines get new weights.
HOLDING = ("recompute", "keep")
STALENESS, TAIL = "rollout.max_staleness", "rollout.tail_fraction"


def _without_engines(config: Config) -> Problems:
    if uses_engines(config):
        return
    rollout = config.rollout
    for name, value, wanted in (
        (STALENESS, rollout.max_staleness, 0),
        ("rollout.dynamic_sampling", rollout.dynamic_sampling, False),
        (TAIL, rollout.tail_fraction, 0.0),
    ):
        if value != wanted:
            allowed = f"{str(wanted).lower()} with training.objective=sft, which samples nothing"
            yield Problem("not-for-supervised", name, str(value).lower(), allowed, "leave it out")


def _colocated(config: Config) -> Problems:
    if is_off_policy(config) and takes_turns(config) and not config.rollout.tail_fraction:
        allowed = "0 where trainer and engines take turns on the same GPUs, unless a tail is left to the next step"
        remedy = (
            "give engines nodes of their own (engine.own_nodes), or GPUs of their own with engine.sleep=never; or set "
            "rollout.tail_fraction=0.25 and rollout.on_new_weights=abort"
        )
        yield Problem("engines-share-gpus", STALENESS, str(config.rollout.max_staleness), allowed, remedy)


def _tail(config: Config) -> Problems:
    rollout = config.rollout
    if not (rollout.tail_fraction and uses_engines(config)):
        return
    if not takes_turns(config):
        allowed = "0 where trainer and engines do not take turns on the same GPUs"
        remedy = f"leave it out; with {STALENESS} above 0 such engines run ahead"
        yield Problem("tail-of-own-engines", TAIL, str(rollout.tail_fraction), allowed, remedy)
    elif not rollout.max_staleness:
        allowed = f"at least 1 with {TAIL}: what is left is finished with newer weights"
        yield Problem("tail-without-staleness", STALENESS, "0", allowed, f"set {STALENESS}=1")
    elif rollout.on_new_weights != "abort":
        allowed = f"abort with {TAIL}: engines that sleep hold no request"
        remedy = "set rollout.on_new_weights=abort"
        yield Problem("tail-aborts", "rollout.on_new_weights", rollout.on_new_weights, allowed, remedy)


def _steps(config: Config) -> Problems:
    staleness, steps = config.rollout.max_staleness, config.training.num_steps
    if is_off_policy(config) and staleness >= steps:
        allowed = f"below training.num_steps={steps}: the whole run would be sampled by its first weights"
        yield Problem("staleness-exceeds-run", STALENESS, str(staleness), allowed, f"set at most {steps - 1}")


def _objective(config: Config) -> Problems:
    algorithm = config.algorithm
    if is_off_policy(config) and algorithm.old_logprobs == "trainer" and algorithm.correction == "none":
        allowed = "mask or truncate with rollout.max_staleness above 0: nothing else weighs tokens of older weights"
        remedy = "set algorithm.preset=tis, icepop or mis, or algorithm.old_logprobs=engine"
        yield Problem("staleness-uncorrected", "algorithm.correction", "none", allowed, remedy)


def _draft(config: Config) -> Problems:
    mode = config.rollout.on_new_weights
    if is_off_policy(config) and config.engine.mtp_steps and mode in HOLDING:
        allowed = "abort or finish with engine.mtp_steps: a draft must not be checked by newer weights than its own"
        yield Problem("drafts-in-flight", "rollout.on_new_weights", mode, allowed, "set rollout.on_new_weights=abort")


def _longest_first(config: Config) -> Problems:
    if config.rollout.longest_first and not uses_queue(config):
        allowed = "false where a step asks for all its groups at once"
        remedy = f"leave it out; with rollout.dynamic_sampling=true or {STALENESS} above 0 groups start one by one"
        yield Problem("order-without-queue", "rollout.longest_first", "true", allowed, remedy)


QUEUE_RULES: tuple[Callable[[Config], Problems], ...] = (
    _without_engines,
    _colocated,
    _tail,
    _steps,
    _objective,
    _longest_first,
    _draft,
)
