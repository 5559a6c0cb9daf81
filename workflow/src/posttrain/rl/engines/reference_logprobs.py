"""Checks that a server serves the exported weights, against the trainer's reference log-probabilities of four prompts.

A healthy server may have loaded FP8 codes without their scales, hold dummy weights, or use another chat template than
training did; its answers may look plausible for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs
from posttrain.config.mismatch import MismatchLimits
from posttrain.errors import ConfigError, Problem, one_line
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.teacher_forcing import ForcedTokens

# Limit of the mean |server - trainer| in nats, by served precision. The first two are the limits of training, whose
# class documents the measurements. For four bits there is no published number; wrong weights differ by 0.7 and more.
# Rounding of FP32 weights to a BF16 export is included.
ROUNDED = "bf16 of fp32"
BOUNDS = {"bf16": MismatchLimits().bf16, "fp8": MismatchLimits().quantised, "nvfp4": 0.15}
BOUNDS[ROUNDED] = BOUNDS["fp8"]
# Long enough for kernels that compile at the first request.
REQUEST_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Held:
    """Result of comparing a server with reference log-probabilities.

    Args:
        num_tokens: Tokens compared.
        difference: Mean |server - trainer| over them, in nats; infinite if a server value is not finite.
        largest: The maximum difference.
        server_mean: The server's mean log-probability.
        trainer_mean: The trainer's.
        precision: Precision of the served weights, one of `BOUNDS`.
        chat: What is wrong with the server's chat endpoint; empty if it renders the trainer's prompts or is not tested.
        has_chat: The chat endpoint was tested.
    """

    num_tokens: int
    difference: float
    largest: float
    server_mean: float
    trainer_mean: float
    precision: str
    chat: str = ""
    has_chat: bool = True


async def hold(
    url: str,
    secret: str,
    canary: ReferenceLogprobs,
    precision: str,
    ready_seconds: float = 0.0,
    check_process: Callable[[], None] | None = None,
    has_chat: bool = True,
) -> Held:
    """Wait until a server is healthy, then compare its log-probabilities with the reference.

    Args:
        url: Server URL.
        secret: The server's secret; empty: none.
        canary: The reference log-probabilities.
        precision: Precision of the served weights, "bf16", "fp8" or "nvfp4".
        ready_seconds: The server must be healthy within this.
        check_process: Called while waiting; raises if the server's process has ended.
        has_chat: Test the chat endpoint, too.

    Raises:
        RuntimeError: The server does not become healthy, or does not answer.
        ConfigError: It serves other weights; states the difference and possible reasons.
    """
    async with ForcedTokens(url, secret, REQUEST_TIMEOUT_SECONDS) as server:
        await server.wait_ready(ready_seconds, check_process)
        pairs = [(prompt.prompt_tokens, prompt.response_tokens) for prompt in canary.prompts]
        answers = await server.logprobs(pairs, await server.interface())
        has_chat = has_chat and all(prompt.messages for prompt in canary.prompts)
        # Compares two unrounded answers of the same server.
        chat = await _chat_problem(server, canary, BOUNDS[precision]) if has_chat else ""
        kind = ROUNDED if (precision, canary.trainer) == ("bf16", "fp32") else precision
        held = replace(compare(canary, answers, kind, chat), has_chat=has_chat)
    if wrong := problems_of(url, held):
        raise ConfigError(wrong)
    return held


async def wait_healthy(url: str, secret: str, seconds: float, check_process: Callable[[], None]) -> None:
    """Wait until an arbitrary server is healthy.

    Raises:
        RuntimeError: The server does not become healthy in time, or has ended.
    """
    async with ForcedTokens(url, secret, REQUEST_TIMEOUT_SECONDS) as server:
        await server.wait_ready(seconds, check_process)


def problems_of(url: str, held: Held) -> list[Problem]:
    """Return the problems that a server has; empty if it serves the exported weights."""
    bound, found = BOUNDS[held.precision], []
    if not held.difference <= bound:
        value = (
            f"its log-probabilities are {held.difference:.3g} nats from the trainer's in the mean of {held.num_tokens} "
            f"tokens (largest {held.largest:.3g}; server {held.server_mean:.3g}, trainer {held.trainer_mean:.3g})"
        )
        found.append(
            Problem("logprobs-differ", url, value, f"at most {bound:g} nats in {held.precision}", _causes(held, bound))
        )
    if held.chat:
        remedy = "serve without a template of the server's own, from the exported folder's tokenizer and template"
        found.append(Problem("template-differs", url, held.chat, "the tokens that the model was trained with", remedy))
    return found


def near(held: Held) -> str:
    """Return the result as a sentence."""
    bound = f"at most {BOUNDS[held.precision]:g} in {held.precision}"
    apart = f"{held.difference:.2g} nats from the trainer's in the mean of {held.num_tokens} tokens ({bound})"
    return f"its log-probabilities are {apart}"


def told(held: Held) -> str:
    """Return the result with that of the chat endpoint as a sentence."""
    return near(held) + (", and its chat endpoint renders prompts as the trainer did" if held.has_chat else "")


def _causes(held: Held, bound: float) -> str:
    if not math.isfinite(held.difference):
        return "scales that were not loaded, or kernels that overflow: see its log, and serve the exported folder"
    if held.difference > 10 * bound:
        what = "dummy weights (--load-format dummy), quantised weights without their scales, or another checkpoint"
        return f"see what it says it has loaded: {what}"
    return "another precision than the folder's, a quantised KV cache, attention to other keys, or an older checkpoint"


def compare(
    canary: ReferenceLogprobs, answers: Sequence[Sequence[float | None]], precision: str, chat: str = ""
) -> Held:
    """Compare a server's log-probabilities with the trainer's.

    Args:
        canary: The trainer's.
        answers: The server's, for each continuation.
        precision: See `Held`.
        chat: See `Held`.

    Example:
        Trainer (-1, -2), server (-1, -5): difference 1.5, largest 3, means -3 and -1.5.
    """
    trainer = [value for prompt in canary.prompts for value in prompt.logprobs]
    server = [math.nan if value is None else value for answer in answers for value in answer]
    apart = [abs(mine - other) for mine, other in zip(trainer, server, strict=True)]
    count, is_number = len(trainer), all(math.isfinite(value) for value in apart)
    return Held(
        num_tokens=count,
        difference=sum(apart) / count if is_number else math.inf,
        largest=max(apart) if is_number else math.inf,
        server_mean=sum(server) / count,
        trainer_mean=sum(trainer) / count,
        precision=precision,
        chat=chat,
    )


async def _chat_problem(server: ForcedTokens, canary: ReferenceLogprobs, bound: float) -> str:
    """Return how the chat endpoint's rendering differs from the trainer's; empty if it does not.

    Most servers report a prompt's token count and the next token's probability. Both must equal those that the same
    server reports for the trainer's tokens.
    """
    try:
        name, apart = await server.model_name(), []
        for place, prompt in enumerate(canary.prompts):
            count, likeliest = await server.first_of_chat(prompt.messages, prompt.tools, canary.template_kwargs, name)
            if count != len(prompt.prompt_tokens):
                trained = f"{len(prompt.prompt_tokens)} in training"
                return f"its chat endpoint makes {count} tokens of prompt {place + 1}, which had {trained}"
            apart.append(abs(likeliest - await server.first_of_tokens(prompt.prompt_tokens, name)))
    except EngineError as error:
        return f"its chat endpoint cannot be asked: {one_line(str(error))}"
    if (mean := sum(apart) / len(apart)) > bound:
        return f"what follows its chat endpoint's prompts is {mean:.3g} nats from what follows the trained ones"
    return ""
