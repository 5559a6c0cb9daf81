"""The program that plays the agent's seat: a chat loop like that of verifiers' harness `null`.

Their program is started with uv, which it downloads. This one runs in this process; what it does with a call is theirs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
from openai import AsyncOpenAI, omit
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

# As long as the program of `null` waits for tool servers.
CONNECT_SECONDS = 60.0
# Calls a function of the task's.
CallTool = Callable[[str, dict[str, Any]], Awaitable[Any]]
# Asks the task whether a call may be made: "action" is "deny" if not, and "message" is its result.
Gate = Callable[[Any], Awaitable[dict[str, Any]]]


class ChatHarness(NullHarness):
    """Asks the model, calls the task's tools, and asks again until a response has no call."""

    async def setup(self, runtime: Runtime) -> None:
        """See `Harness`; nothing has to be installed."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """See `Harness`."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncExitStack() as stack,
            AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0) as client,
            httpx.AsyncClient(timeout=None) as http,
        ):
            connecting = connect_mcp({"mcpServers": servers}, stack)
            tools, dispatch, connections = await asyncio.wait_for(connecting, CONNECT_SECONDS)
            call_tool = partial(call_mcp, connections, dispatch)
            gate = partial(gate_tool_call, http, tool_interception_url, secret) if tool_interception_url else None
            messages = first_messages(*self.resolve_prompt(data))
            while True:
                asked = client.chat.completions.create(model=ctx.model, messages=messages, tools=tools or omit)
                choice = (await asked).choices[0]
                message = choice.message
                messages.append(message.model_dump(exclude_none=True))
                # A limit has cut the response, so that its last call may be half of one.
                if choice.finish_reason == "length" or not message.tool_calls:
                    break
                messages += [await _result(call, dispatch, call_tool, gate) for call in message.tool_calls]
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(call: Any, known: Sequence[str], call_tool: CallTool, gate: Gate | None) -> dict[str, Any]:
    """Return the message that answers a call of a function, cut where it is too long."""
    if gate is not None and (decision := await gate(call))["action"] == "deny":
        return bound_tool_message(decision["message"])
    name = call.function.name
    content = _why_no_arguments(call.function.arguments)
    if not content:
        is_known = name in known
        given = json.loads(call.function.arguments)
        content = await call_tool(name, given) if is_known else f"error: unknown tool {name!r}"
    return bound_tool_message({"role": "tool", "tool_call_id": call.id, "content": content, "name": name})


def _why_no_arguments(text: str) -> str:
    """Return what is wrong with a call's arguments, in the words of `null`; "" if nothing is."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if isinstance(arguments, dict):
        return ""
    return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"


def first_messages(system_prompt: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return the messages that a task begins with, in OpenAI's form.

    Args:
        system_prompt: The task's, if it has one.
        prompt: A text, verifiers' messages, or None.
    """
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}] if prompt else messages
    return [*messages, *map(message_to_wire, prompt or ())]
