"""OpenAI's endpoints over the same worker: /v1/completions, /v1/chat/completions and /v1/models.

Evaluation harnesses use this API. As with /generate, a request is one batch, whatever its number of prompts and
choices, and log-probabilities are those of the tempered distribution for sampled tokens, at temperature 1 for prompt
tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from posttrain.rl.engines.embedded.generation import Alternatives, Response
from posttrain.rl.engines.embedded.model import LoadedModel
from posttrain.rl.engines.embedded.openai_requests import Asked, parse_chat, parse_completions
from posttrain.rl.engines.embedded.requests import ModelLimits, read_json
from posttrain.rl.engines.embedded.texts import Texts, cut_at
from posttrain.rl.engines.embedded.worker import Work, Worker


class OpenAIEndpoints:
    """OpenAI's endpoints for completions and chat."""

    def __init__(self, loaded: LoadedModel, worker: Worker):
        self._loaded, self._worker = loaded, worker
        self._texts, self._started = Texts(loaded.folder), int(time.time())
        self._limits = ModelLimits(loaded.vocab_size, loaded.max_positions, loaded.eos_token_ids)

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes of these endpoints."""
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
        ]

    async def completions(self, request: web.Request) -> web.Response:
        """Continue texts."""
        body = await read_json(request)
        asked = parse_completions(body, self._texts, self._limits)
        responses = await self._responses(asked)
        choices = [self._completion(place, response, asked) for place, response in enumerate(responses)]
        return self._answer(body, "text_completion", "cmpl", choices, responses, asked)

    async def chat(self, request: web.Request) -> web.Response:
        """Answer a conversation."""
        body = await read_json(request)
        asked = parse_chat(body, self._texts, self._limits)
        responses = await self._responses(asked)
        choices = [
            {
                "index": place,
                "message": {"role": "assistant", "content": self._text(response, asked)},
                "logprobs": {"content": self._chat_logprobs(response)} if asked.with_logprobs else None,
                "finish_reason": _finish_reason(response),
            }
            for place, response in enumerate(responses)
        ]
        return self._answer(body, "chat.completion", "chatcmpl", choices, responses, asked)

    async def models(self, request: web.Request) -> web.Response:
        """List the served model."""
        model = {
            "id": str(self._loaded.folder),
            "object": "model",
            "created": self._started,
            "owned_by": "posttrain",
            "max_model_len": self._loaded.max_positions,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _responses(self, asked: Asked) -> list[Response]:
        responses = await asyncio.wrap_future(self._worker.submit(Work(asked.rows)))
        if any(response.finish_reason and response.finish_reason["type"] == "abort" for response in responses):
            # OpenAI's API has no finish reason for an abort, and a partial answer must not look complete.
            raise RuntimeError("the request was aborted")
        return responses

    def _answer(
        self,
        body: Mapping[str, Any],
        kind: str,
        prefix: str,
        choices: Sequence[Mapping[str, Any]],
        responses: Sequence[Response],
        asked: Asked,
    ) -> web.Response:
        prompt = sum(len(response.row.input_ids) for response in responses[:: asked.num_choices])
        completion = sum(len(response.output_ids) for response in responses)
        return web.json_response(
            {
                "id": f"{prefix}-{uuid.uuid4().hex}",
                "object": kind,
                "created": int(time.time()),
                "model": body.get("model") or str(self._loaded.folder),
                "choices": choices,
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": completion,
                    "total_tokens": prompt + completion,
                },
            }
        )

    def _text(self, response: Response, asked: Asked) -> str:
        return cut_at(self._texts.answer(response.output_ids), asked.stops)

    def _completion(self, place: int, response: Response, asked: Asked) -> dict[str, Any]:
        echo = asked.echoes[place // asked.num_choices] if asked.echoes else ""
        return {
            "index": place,
            "text": echo + self._text(response, asked),
            "logprobs": self._completion_logprobs(response, bool(asked.echoes)) if asked.with_logprobs else None,
            "finish_reason": _finish_reason(response),
        }

    def _completion_logprobs(self, response: Response, echo: bool) -> dict[str, Any]:
        """Return one entry per token; a prompt's first token has no log-probability."""
        tokens, logprobs = list(response.output_ids), list[float | None](response.logprobs)
        alternatives = list[Alternatives | None](response.alternatives or [[] for _ in tokens])
        if echo:
            scores = response.prompt_scores
            assert scores is not None, "an echo with log-probabilities asks for the prompt's"
            tokens = [*response.row.input_ids, *tokens]
            logprobs = [None, *scores.logprobs, *logprobs]
            alternatives = [None, *scores.alternatives, *alternatives]
        return {
            "tokens": [self._texts.spelled([token]) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": [
                None if some is None or logprob is None else self._by_text([*some, (token, logprob)])
                for token, logprob, some in zip(tokens, logprobs, alternatives, strict=True)
            ],
        }

    def _by_text(self, tokens: Alternatives) -> dict[str, float]:
        """Return log-probabilities by token text; among tokens with equal text (pieces of a character), the highest."""
        found: dict[str, float] = {}
        for token, logprob in tokens:
            text = self._texts.spelled([token])
            found[text] = max(logprob, found.get(text, logprob))
        return found

    def _chat_logprobs(self, response: Response) -> list[dict[str, Any]]:
        alternatives = response.alternatives or [[] for _ in response.output_ids]
        return [
            {**self._spelled(token, logprob), "top_logprobs": [self._spelled(*one) for one in some]}
            for token, logprob, some in zip(response.output_ids, response.logprobs, alternatives, strict=True)
        ]

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts.spelled([token])
        # A piece of a character has no text.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(response: Response) -> str:
    assert response.finish_reason is not None, "a response that came back has ended"
    return str(response.finish_reason["type"])
