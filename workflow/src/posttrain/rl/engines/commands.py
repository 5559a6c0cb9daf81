"""Questions and commands to all engines of a run that concern no single request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from posttrain.rl.engines.calls import Engine, EngineCalls
from posttrain.rl.engines.responses import answers_of_ranks


class EngineCommands(EngineCalls):
    """Asks all engines about their state, and pauses them."""

    @contextmanager
    def _one_engine(self) -> Iterator[Engine]:
        """Give an engine for a question that any can answer."""
        yield self._engines[0]

    async def server_info(self) -> list[dict[str, Any]]:
        """Return each engine's server info."""
        return await self.call_all("GET", "/get_server_info", may_repeat=True)

    async def weight_versions(self) -> list[str | None]:
        """Return the weight version that each engine reports."""
        answers = await self.call_all("GET", "/get_model_info", may_repeat=True)
        return [answer.get("weight_version") for answer in answers]

    async def parse_tool_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[Mapping[str, Any]]]:
        """Return a response's text without its calls, and the calls, each with "name" and "parameters" (JSON text).

        Args:
            text: The response.
            tools: JSON schemas of the functions that it may call.
            parser: SGLang's name of a parser.

        Raises:
            EngineError: The engine fails or has no such parser.
        """
        body = {"text": text, "tools": [*tools], "tool_call_parser": parser}
        with self._one_engine() as engine:
            answer = await self.call(engine, "POST", "/parse_function_call", body, may_repeat=True)
        return answer["normal_text"], answer["calls"]

    async def checksums(self) -> list[dict[str, str]]:
        """Return the checksum of each tensor, per engine; names and hashes are the engine's own."""
        answers = await self.call_all("POST", "/weights_checker", {"action": "checksum"}, may_repeat=True)
        return [answer["ranks"][0]["checksums"] for answer in answers]

    async def ask_ranks(
        self, call: str, may_repeat: bool = True, each: Sequence[Mapping[str, Any]] = (), **order: Any
    ) -> list[list[str]]:
        """Send a weight command to every rank of every engine (`posttrain_weights.engine_handlers`).

        Args:
            call: The command.
            may_repeat: The command is idempotent.
            each: Arguments per engine.
            order: Arguments for all engines.

        Returns:
            Answers per engine, in rank order.

        Raises:
            RuntimeError: A rank failed; names it.
        """
        orders = [{"call": call, **order, **own} for own in each or [{}] * len(self._engines)]
        bodies = [{"action": json.dumps(told), "selector": "target"} for told in orders]
        answers = await self.call_each("POST", "/weights_checker", bodies, may_repeat)
        named = zip(map(str, self._engines), answers, strict=True)
        return [answers_of_ranks(name, answer["ranks"]) for name, answer in named]

    async def flush_cache(self) -> None:
        """Drop the engines' prefix caches."""
        await self.call_all("POST", "/flush_cache", {}, may_repeat=True)

    async def pause_generation(self, mode: str = "abort") -> None:
        """Hold generation on all engines; `mode` is SGLang's: "abort", "in_place" or "retract"."""
        await self.call_all("POST", "/pause_generation", {"mode": mode}, may_repeat=True)

    async def continue_generation(self) -> None:
        """Go on after a pause."""
        await self.call_all("POST", "/continue_generation", {}, may_repeat=True)

    async def abort_all(self) -> None:
        """Abort all running and waiting requests on all engines."""
        await self.call_all("POST", "/abort_request", {"abort_all": True}, may_repeat=True)
