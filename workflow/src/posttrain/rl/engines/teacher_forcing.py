"""Teacher forcing: log-probabilities of given tokens, over SGLang's or OpenAI's API.

The log-probabilities are those of prompt tokens, at temperature 1; sampled tokens are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.http_answers import MALFORMED
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient

# Tokens at one position with their log-probabilities.
Likeliest = list[tuple[int, float]]
ABOUT_SECONDS = 60.0
# Request one token, because not every server accepts zero. Only its probability is used.
ONE_TOKEN = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0}


class ForcedTokens(EngineClient):
    """A client of one server that computes log-probabilities of given tokens.

    Args:
        url: Server URL, "http://host:port".
        secret: The server's secret; empty: none.
        request_timeout_seconds: Every answer must arrive within this.
    """

    # Enough for log-probabilities of four prompts.
    _max_answer_bytes = 64 << 20

    def __init__(self, url: str, secret: str, request_timeout_seconds: float):
        super().__init__([url], secret, request_timeout_seconds)
        if not secret:
            self._headers = {}

    def _seconds_of(self, method: str) -> float:
        # An idle server must answer at once.
        return min(ABOUT_SECONDS, self._timeout_seconds) if method == "GET" else self._timeout_seconds

    async def interface(self) -> str:
        """Return "sglang" if the server has SGLang's /generate, else "openai"."""
        try:
            (about,) = await self.server_info()
        except EngineError:
            return "openai"
        return "sglang" if isinstance(about, dict) else "openai"

    async def model_name(self) -> str:
        """Return the model's name for requests.

        Raises:
            EngineError: The server has no OpenAI API, or serves no model.
        """
        answer = await self._ask("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except MALFORMED as error:
            raise EngineError(f"{self._engines[0]}: /v1/models names no model") from error

    async def logprobs(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], interface: str
    ) -> list[list[float | None]]:
        """Return the log-probability of each token of each continuation.

        Args:
            pairs: Token ids of a prompt, and of the forced continuation.
            interface: "sglang" or "openai".

        Returns:
            One list per continuation; None for a token without a value from the server.

        Raises:
            EngineError: The server does not compute them, or gives a malformed answer.
        """
        one = self._by_generate if interface == "sglang" else self._by_completions
        name = "" if interface == "sglang" else await self.model_name()
        return list(await asyncio.gather(*(one(prompt, response, name) for prompt, response in pairs)))

    async def likeliest(self, prompt: Sequence[int], response: Sequence[int], count: int) -> list[Likeliest]:
        """Return the top tokens at each position of a continuation, over SGLang's API.

        Args:
            prompt: Token ids.
            response: Token ids of the forced continuation.
            count: Number of top tokens per position.

        Returns:
            (token, log-probability) pairs for each position, most likely first.

        Raises:
            EngineError: The server does not report them.
        """
        meta = await self._forced(prompt, response, {"top_logprobs_num": count})
        try:
            found = meta["input_top_logprobs"][-len(response) :]
            places = [[(int(entry[1]), float(entry[0])) for entry in place] for place in found]
        except MALFORMED as error:
            raise EngineError(f"{self._engines[0]}: /generate does not tell the likeliest tokens") from error
        if [len(place) for place in places] != [count] * len(response):
            raise EngineError(f"{self._engines[0]}: /generate does not tell {count} tokens of each place")
        return places

    async def _by_generate(self, prompt: Sequence[int], response: Sequence[int], _: str) -> list[float | None]:
        meta = await self._forced(prompt, response, {})
        try:
            return [None if entry[0] is None else float(entry[0]) for entry in meta["input_token_logprobs"]]
        except (TypeError, ValueError) as error:
            raise EngineError(f"{self._engines[0]}: /generate has log-probabilities that are no numbers") from error

    async def _forced(self, prompt: Sequence[int], response: Sequence[int], more: Mapping[str, Any]) -> dict[str, Any]:
        """Return /generate's values for a given continuation, without those of the prompt."""
        body = {
            "input_ids": [*prompt, *response],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0},
            "return_logprob": True,
            # The first entry has no log-probability.
            "logprob_start_len": len(prompt) - 1,
            **more,
        }
        answer = await self._ask("POST", "/generate", body)
        try:
            meta = dict(answer["meta_info"])
            meta["input_token_logprobs"] = found = meta["input_token_logprobs"][-len(response) :]
            tokens = [int(entry[1]) for entry in found]
        except MALFORMED as error:
            raise EngineError(f"{self._engines[0]}: /generate has no log-probabilities of a prompt") from error
        if tokens != list(response):
            raise EngineError(f"{self._engines[0]}: /generate answers of other tokens than it was asked")
        return meta

    async def _by_completions(self, prompt: Sequence[int], response: Sequence[int], name: str) -> list[float | None]:
        body = {"model": name, "prompt": [*prompt, *response], "echo": True, "logprobs": 1, **ONE_TOKEN}
        answer = await self._ask("POST", "/v1/completions", body)
        try:
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
            values = [None if value is None else float(value) for value in found]
        except MALFORMED as error:
            told = "it does not echo a prompt with log-probabilities"
            raise EngineError(f"{self._engines[0]}: /v1/completions: {told}") from error
        if len(values) not in (count := len(prompt) + len(response), count + 1):
            told = f"{len(values)} log-probabilities for {count} tokens"
            raise EngineError(f"{self._engines[0]}: /v1/completions: {told}")
        return values[len(prompt) : count]

    async def first_of_tokens(self, prompt: Sequence[int], name: str) -> float:
        """Return the log-probability of the most likely next token after a prompt of token ids."""
        body = {"model": name, "prompt": list(prompt), "logprobs": 1, **ONE_TOKEN}
        answer = await self._ask("POST", "/v1/completions", body)
        try:
            return max(float(value) for value in answer["choices"][0]["logprobs"]["top_logprobs"][0].values())
        except MALFORMED as error:
            raise EngineError(f"{self._engines[0]}: /v1/completions has no log-probabilities") from error

    async def first_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        name: str,
    ) -> tuple[int, float]:
        """Return a conversation's token count on the server, and the most likely next token's log-probability."""
        body = {
            "model": name,
            "messages": [dict(message) for message in messages],
            "logprobs": True,
            "top_logprobs": 1,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
            **({"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}),
            **ONE_TOKEN,
        }
        answer = await self._ask("POST", "/v1/chat/completions", body)
        try:
            (first,) = answer["choices"][0]["logprobs"]["content"][:1]
            likeliest = max(float(entry["logprob"]) for entry in first["top_logprobs"])
            return int(answer["usage"]["prompt_tokens"]), likeliest
        except MALFORMED as error:
            raise EngineError(f"{self._engines[0]}: /v1/chat/completions has no log-probabilities") from error

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self.call(self._engines[0], method, path, body, may_repeat=True)
