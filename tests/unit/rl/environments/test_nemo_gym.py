"""The client of NeMo Gym's resources servers, against a counter with their API and sessions.

`tests/end_to_end/test_public_environments.py` runs it against their own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid

import pytest
from aiohttp import web
from tests.support.answering_services import answering

from posttrain.rl.environments.nemo_gym import NemoGymEnvironment
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
ASKED = {"instructions": "Count.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]}
ROW = {"messages": [], "label": None, "expected": 3, "responses_create_params": {**ASKED, "tools": [TOOL]}}


class Counter:
    """Counts in sessions that are named by a cookie, as NeMo Gym's example does.

    Args:
        loses: The path that forgets its session: it begins another one, without a word.
    """

    def __init__(self, loses: str = ""):
        self.loses, self.counts, self.verified = loses, {}, {}

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/{name}", self.answer)]

    async def answer(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        cookie = "" if name == self.loses else request.cookies.get("Counter___x", "")
        session = json.loads(base64.b64decode(cookie.split(".")[0]))["session_id"] if cookie else str(uuid.uuid4())
        self.counts.setdefault(session, 0)
        response = web.json_response({}, status=200)
        if name == "add":
            if "count" not in body:
                response = web.json_response({"detail": "count is missing"}, status=422)
            elif body["count"] == 66:
                response = web.json_response("a defect", status=500)
            else:
                self.counts[session] += body["count"]
        if name == "verify":
            self.verified = body
            content = {**body, "reward": float(self.counts[session] == body["expected"]), "count": self.counts[session]}
            response = web.json_response({**content, "note": "counted"})
        packed = base64.b64encode(json.dumps({"session_id": session}).encode()).decode()
        response.set_cookie("Counter___x", f"{packed}.date.signature")
        return response


def act(*arguments: object, text: str = "", name: str = "add") -> Message:
    calls = [{"id": f"call_{i}", "function": {"name": name, "arguments": given}} for i, given in enumerate(arguments)]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def play(*actions: Message, loses: str = "", row: dict = ROW):
    """Return the start, what each action is answered with, the reward and the request to /verify."""

    async def episode():
        counter = Counter(loses)
        async with answering(*counter.routes()) as url:
            environment = NemoGymEnvironment(url, 5, 0)
            try:
                start = await environment.reset(row)
                answers = [await environment.step(action) for action in actions]
                messages = list(start.messages)
                for action, answer in zip(actions, answers, strict=True):
                    messages += [action, *answer.messages]
                return start, answers, await environment.reward({"messages": messages}), counter.verified
            finally:
                await environment.close()

    return asyncio.run(episode())


def contents(answer: Observation) -> list[str]:
    return [message["content"] for message in answer.messages]


def test_an_episode():
    earlier = {"role": "assistant", "content": "What shall I count?"}
    asked = {**ROW["responses_create_params"], "input": [earlier, *ASKED["input"]]}
    row = {**ROW, "responses_create_params": asked}
    start, answers, reward, verified = play(act({"count": 1}, {"count": 2}), act(text="3"), row=row)
    system, user = {"role": "system", "content": "Count."}, {"role": "user", "content": "go"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert start == Start((system, earlier, user), [tool])
    assert contents(answers[0]) == ["{}", "{}"]
    assert answers[1] == Observation((), True)
    assert reward == EpisodeReward(1.0, {"count": 3.0})
    output = verified["response"]["output"]
    assert [item["type"] for item in output] == ["function_call"] * 2 + ["function_call_output"] * 2 + ["message"]
    assert [item["call_id"] for item in output[:2]] == [item["call_id"] for item in output[2:4]]
    assert output[0]["call_id"] != output[1]["call_id"]
    assert json.loads(output[1]["arguments"]) == {"count": 2}
    assert output[4]["content"][0]["text"] == "3"
    assert (verified["expected"], verified["responses_create_params"]) == (3, asked)


def test_calls_of_the_same_name_in_two_turns_are_two():
    output = play(act({"count": 1}), act({"count": 2}), act(text="3"))[3]["response"]["output"]
    assert output[0]["call_id"] == output[1]["call_id"] != output[2]["call_id"] == output[3]["call_id"]


def test_the_agents_mistakes_are_told_to_it():
    _, answers, reward, _ = play(act({}), act("1 + 2"), act({}, name="verify"), act(text="3"))
    assert contents(answers[0]) == ['{"detail": "count is missing"}']
    assert contents(answers[1]) == ["error: the arguments are not a JSON object"]
    assert contents(answers[2]) == ["error: there is no function 'verify'"]
    assert reward.reward == 0


@pytest.mark.parametrize("loses", ["add", "verify"])
def test_a_lost_session_is_a_failure_and_no_zero(loses: str):
    with pytest.raises(EnvironmentFailure, match="crash: the server lost the session"):
        play(act({"count": 3}), act(text="3"), loses=loses)


def test_a_server_that_was_started_again_is_a_failure_and_no_zero():
    """It accepts the cookie and knows nothing of the session."""

    async def episode():
        async with answering(*Counter().routes()) as url:
            environment = NemoGymEnvironment(url, 5, 0)
            await environment.reset(ROW)
            await environment.step(act({"count": 3}))
        port = int(url.rpartition(":")[2])
        async with answering(*Counter().routes(), port=port):
            with pytest.raises(EnvironmentFailure) as caught:
                await environment.reward({"messages": []})
        await environment.close()
        return caught.value.kind, caught.value.reason

    assert asyncio.run(episode()) == ("crash", "the server has closed its connections; its sessions may be lost")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "the row has no responses_create_params"),
        ({"responses_create_params": {"input": [{"type": "image"}]}}, "is not a text message"),
        ({"responses_create_params": {"input": []}}, "reset returned no messages"),
    ],
)
def test_rows_of_another_kind(row: dict, reason: str):
    with pytest.raises(EnvironmentFailure, match=reason):
        play(row=row)


def test_failures_of_the_server():
    with pytest.raises(EnvironmentFailure, match='crash: /add: HTTP 500: "a defect"'):
        play(act({"count": 66}))

    async def alone():
        environment = NemoGymEnvironment("http://127.0.0.1:1", 5, 0)
        with pytest.raises(EnvironmentFailure, match="crash: the server cannot be reached"):
            await environment.reset(ROW)
        await environment.close()
        async with answering(web.post("/seed_session", lambda request: _empty())) as url:
            environment = NemoGymEnvironment(url, 5, 0)
            with pytest.raises(EnvironmentFailure, match="error: /seed_session set no cookie"):
                await environment.reset(ROW)
            await environment.close()

    asyncio.run(alone())


async def _empty() -> web.Response:
    return web.json_response({})
