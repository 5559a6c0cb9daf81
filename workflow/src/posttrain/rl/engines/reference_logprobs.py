"""Whether a server serves the weights that were exported: held against the trainer's own words of four prompts.

A server that is healthy may have read FP8 codes without their scales, hold dummy weights, or render conversations with
another template than the model was trained with; each answers fluently enough to be believed, for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs
from posttrain.config.mismatch import MismatchLimits
from posttrain.errors import ConfigError, Problem, one_line
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.teacher_forcing import ForcedTokens

# Largest mean |server - trainer| in nats, by the precision of the weights served. The first two are training's own
# limits, whose class says what was measured. Of four bits there is no published number; other weights than the
# trainer's are at 0.7 and more. What a trainer had in FP32 and exports in BF16 is rounded, too.
ROUNDED = "bf16 of fp32"
BOUNDS = {"bf16": MismatchLimits().bf16, "fp8": MismatchLimits().quantised, "nvfp4": 0.15}
BOUNDS[ROUNDED] = BOUNDS["fp8"]
# One prompt is short: kernels that compile for it at its first request take longest.
REQUEST_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Held:
    """A server held against a canary.

    Args:
        num_tokens: That were compared.
        difference: Mean |server - trainer| over them, in nats; infinite where the server's values are no numbers.
        largest: The largest of them.
        server_mean: The server's mean log-probability.
        trainer_mean: The trainer's.
        precision: Of the weights that were asked, one of `BOUNDS`.
        chat: What is wrong with the server's chat endpoint; empty where its prompts are the trainer's, or nobody asked.
    """

    num_tokens: int
    difference: float
    largest: float
    server_mean: float
    trainer_mean: float
    precision: str
    chat: str = ""


async def hold(
    url: str,
    secret: str,
    canary: ReferenceLogprobs,
    precision: str,
    ready_seconds: float = 0.0,
    check_process: Callable[[], None] | None = None,
    has_chat: bool = True,
) -> Held:
    """Wait until a server is healthy, ask it, and compare.

    Args:
        url: Of the server.
        secret: What it wants to be shown; empty: nothing.
        canary: What it has to answer.
        precision: Of the weights that it serves, "bf16", "fp8" or "nvfp4".
        ready_seconds: It must be healthy within this.
        check_process: Called while it is waited for; raises where its process has ended.
        has_chat: Its chat endpoint is asked, too.

    Raises:
        RuntimeError: It does not become healthy, or cannot be asked.
        ConfigError: It serves something else; with what differs and what the reason may be.
    """
    async with ForcedTokens(url, secret, REQUEST_TIMEOUT_SECONDS) as server:
        await server.wait_ready(ready_seconds, check_process)
        pairs = [(prompt.prompt_tokens, prompt.response_tokens) for prompt in canary.prompts]
        answers = await server.logprobs(pairs, await server.interface())
        # Two answers of one server are compared, in which nothing is rounded.
        chat = await _chat_problem(server, canary, BOUNDS[precision]) if has_chat else ""
        kind = ROUNDED if (precision, canary.trainer) == ("bf16", "fp32") else precision
        held = compare(canary, answers, kind, chat)
    if wrong := problems_of(url, held):
        raise ConfigError(wrong)
    return held


async def wait_healthy(url: str, secret: str, seconds: float, check_process: Callable[[], None]) -> None:
    """Wait for a server that nothing is known of.

    Raises:
        RuntimeError: It does not become healthy in time, or has ended.
    """
    async with ForcedTokens(url, secret, REQUEST_TIMEOUT_SECONDS) as server:
        await server.wait_ready(seconds, check_process)


def problems_of(url: str, held: Held) -> list[Problem]:
    """Return what forbids to call a server ready; nothing where it serves what was exported."""
    bound, found = BOUNDS[held.precision], []
    if not held.difference <= bound:
        value = (
            f"its log-probabilities are {held.difference:.3g} nats from the trainer's in the mean of {held.num_tokens} "
            f"tokens (largest {held.largest:.3g}; server {held.server_mean:.3g}, trainer {held.trainer_mean:.3g})"
        )
        found.append(Problem(url, value, f"at most {bound:g} nats in {held.precision}", _causes(held, bound)))
    if held.chat:
        remedy = "serve without a template of the server's own, from the exported folder's tokenizer and template"
        found.append(Problem(url, held.chat, "the tokens that the model was trained with", remedy))
    return found


def near(held: Held) -> str:
    """Return in a sentence how near a server is."""
    bound = f"at most {BOUNDS[held.precision]:g} in {held.precision}"
    apart = f"{held.difference:.2g} nats from the trainer's in the mean of {held.num_tokens} tokens ({bound})"
    return f"its log-probabilities are {apart}"


def told(held: Held) -> str:
    """Return the same of one whose chat endpoint was asked, too."""
    return f"{near(held)}, and its chat endpoint renders prompts as the trainer did"


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
        answers: The server's, of each continuation.
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
    """Return what the chat endpoint makes of the canary's conversations that the trainer did not; empty where nothing.

    Of most servers one learns how many tokens a prompt has, and what follows it. Both have to be as behind the
    trainer's tokens, asked of the same server.
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
