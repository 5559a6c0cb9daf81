"""The client of OpenEnv servers, against one with their messages.

`tests/end_to_end/test_public_environments.py` runs it against their own.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from tests.support.answering_services import answering

from posttrain.rl.environments.openenv import OpenEnvEnvironment
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation

SCHEMA = {
    "title": "Guess",
    "description": "A guess.",
    "type": "object",
    "properties": {"digit": {"type": "integer"}, "metadata": {"type": "object"}},
}
FUNCTION = {
    "name": "act",
    "description": "A guess.",
    "parameters": {"type": "object", "properties": {"digit": {"type": "integer"}}},
}
ROW = {"messages": [{"role": "user", "content": "Play."}], "label": None, "level": 2}


def observed(done: bool = False, reward: object = None, **observation: object) -> dict:
    return {"type": "observation", "data": {"observation": observation, "done": done, "reward": reward}}


def failed(code: str) -> dict:
    return {"type": "error", "data": {"code": code, "message": "no"}}


def act(*arguments: object, name: str = "act") -> Message:
    calls = [{"id": f"call_{i}", "function": {"name": name, "arguments": given}} for i, given in enumerate(arguments)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def play(*actions: Message, answers: list, schema: object = None, deadline: float = 5):
    """Return the start, what each action is answered with, the reward, and what the server has read."""
    read: list[dict] = []

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            read.append(await socket.receive_json())
            if answer == "hang":
                await asyncio.sleep(60)
            if answer == "end":
                request.transport.abort()
                break
            await (socket.send_str(answer) if isinstance(answer, str) else socket.send_json(answer))
        read.append(await socket.receive_json())
        return socket

    async def schemas(request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA} if schema is None else schema)

    async def episode():
        async with answering(web.get("/schema", schemas), web.get("/ws", talk)) as url:
            environment = OpenEnvEnvironment(url, deadline, 7)
            try:
                start = await environment.reset(ROW)
                found = [await environment.step(action) for action in actions]
                return start, found, await environment.reward({})
            finally:
                await environment.close()
                await asyncio.sleep(0.05)

    return *asyncio.run(episode()), read


def test_an_episode():
    answers = [observed(hint="begin"), observed(reward=0.25, hint="higher"), observed(True, 1, hint="right")]
    start, found, reward, read = play(act({"digit": 1}), act({"digit": 2}, {"digit": 3}), answers=answers)
    assert start.messages == ({"role": "user", "content": 'Play.\n\n{"hint": "begin"}'},)
    assert start.tools == [{"type": "function", "function": FUNCTION}]
    contents = [[message["content"] for message in one.messages] for one in found]
    assert contents == [['{"hint": "higher"}'], ['{"hint": "right"}', "error: the episode has ended"]]
    assert [(one.done, one.reward) for one in found] == [(False, 0.25), (True, 1.0)]
    assert reward == EpisodeReward(0.0)
    assert read == [
        {"type": "reset", "data": {"level": 2, "seed": 7}},
        {"type": "step", "data": {"digit": 1}},
        {"type": "step", "data": {"digit": 2}},
        {"type": "close"},
    ]


def test_the_agents_mistakes_are_told_to_it():
    answers = [observed(), failed("VALIDATION_ERROR")]
    actions = (act({"number": 1}), act("1"), act({}, name="move"))
    _, found, _, read = play(*actions, answers=answers)
    assert [one.messages[0]["content"] for one in found] == [
        'error: "no"',
        "error: the arguments are not a JSON object",
        "error: there is no function 'move'; call act",
    ]
    assert len(read) == 3


def test_a_response_without_a_call_ends_the_episode():
    _, found, reward, _ = play({"role": "assistant", "content": "2"}, answers=[observed()])
    assert (found, reward) == ([Observation((), True)], EpisodeReward(0.0))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([failed("CAPACITY_REACHED")], "error: reset: CAPACITY_REACHED"),
        ([observed(), failed("EXECUTION_ERROR")], "error: step: EXECUTION_ERROR"),
        ([observed(), "end"], "crash: the server closed the connection in step"),
        ([observed(), "hang"], "deadline: step was not answered within 1 s"),
        ([observed(), "{"], "error: the answer to step is not an observation"),
        ([observed(), {"type": "state", "data": {}}], "error: step: None"),
        ([observed(), observed(reward="much")], "'reward' is 'much', expected a number"),
        ([observed(), observed(True)], "error: the server ended the episode and gave no reward in any step"),
    ],
)
def test_what_is_a_failure(answers: list, reason: str):
    with pytest.raises(EnvironmentFailure, match=reason):
        play(act({"digit": 1}), answers=answers, deadline=1)


def test_a_server_without_a_schema_or_that_is_not_there():
    with pytest.raises(EnvironmentFailure, match="error: /schema has no schema of actions"):
        play(answers=[], schema=[])

    async def alone():
        environment = OpenEnvEnvironment("http://127.0.0.1:1", 5, 0)
        with pytest.raises(EnvironmentFailure, match="crash: reset: ClientConnectorError"):
            await environment.reset(ROW)
        await environment.close()

    asyncio.run(alone())
