"""One rollout of verifiers whose model is an agent elsewhere: a request to the model waits for the agent's action."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain_verifiers.conversation import Conversation, Message

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.env import Env


class EpisodeFailure(Exception):
    """The episode has no reward.

    Args:
        kind: "error", "deadline" or "crash", as in posttrain's schema.
        reason: What happened.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class Observation:
    """What the agent reads before it acts.

    Args:
        messages: New ones.
        tools: JSON schemas of functions.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]


class Episode:
    """A rollout that waits for an agent.

    Args:
        environment: Is serving.
        task: What is played.
        context: The model; its requests reach `complete`.
    """

    def __init__(self, environment: Env, task: vf.Task, context: ModelContext):
        self._conversation = Conversation()
        self._tools: list[dict[str, Any]] | None = None
        self._asked: asyncio.Queue[Observation] = asyncio.Queue()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._failure: EpisodeFailure | None = None
        # Why no action follows, if that is so.
        self._end = ""
        self.trace: vf.Trace | None = None
        self.num_traces = 0
        (slot,) = environment.slots(task)
        self._rollout = asyncio.create_task(environment.run_slot(slot, context, on_trace=self._begin))

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request to the model with the agent's next action.

        Args:
            body: Of a chat completion.

        Raises:
            EpisodeFailure: No action follows, or the request does not go on from the last one.
        """
        if self._end:
            raise self._stop(self._end)
        try:
            if self._answer is not None:
                raise ValueError("the harness asks the model twice at a time")
            tools = body.get("tools") or []
            if self._tools not in (None, tools):
                raise ValueError("the harness has changed the agent's tools")
            self._tools = tools
            observation = Observation(self._conversation.read(body["messages"]), tools)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._failure = EpisodeFailure("error", f"a request to the model: {error}")
            raise self._failure from error
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(observation)
        return await self._answer

    async def observe(self) -> Observation | None:
        """Return what the agent reads next, None if the episode has ended.

        Raises:
            EpisodeFailure: It has ended without a reward.
        """
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        await self.grade()
        return None

    def act(self, action: Mapping[str, Any], is_cut: bool = False) -> None:
        """Answer the request that waits, if one does.

        Args:
            action: The agent's message.
            is_cut: A limit has cut it.
        """
        answer, self._answer = self._answer, None
        if answer is None:
            raise EpisodeFailure("error", "the episode waits for no action")
        answer.set_result(self._conversation.say(action, is_cut))

    async def finish(self, end: str, last: Mapping[str, Any] | None) -> dict[str, Any]:
        """End the episode where it stands, and return its reward.

        Args:
            end: Why, as in posttrain's schema; verifiers keeps it as the trace's stop condition.
            last: A message of the agent's that the environment has not seen: a response that was cut.

        Raises:
            EpisodeFailure: It has none.
        """
        self._end = end
        if self._answer is not None and last is not None:
            self.act(last, is_cut=True)
        elif self._answer is not None:
            self._answer.set_exception(self._stop(end))
        return await self.grade()

    async def grade(self) -> dict[str, Any]:
        """Return the reward and its parts once the rollout has ended.

        Raises:
            EpisodeFailure: It has none.
        """
        try:
            played = await asyncio.shield(self._rollout)
        except Exception as error:
            raise EpisodeFailure("error", f"{type(error).__name__}: {error}") from error
        if self._failure:
            raise self._failure
        return grade_of(played)

    async def close(self) -> None:
        """End the rollout, whatever it does."""
        self._end = self._end or "closed"
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._stop(self._end))
        self._rollout.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await self._rollout

    def _begin(self, trace: vf.Trace) -> None:
        """Take note of the trace of the agent's one run."""
        self.num_traces += 1
        if self.num_traces > 1:
            self._failure = EpisodeFailure("error", "the environment lets the agent play more than once in an episode")
            raise ValueError(self._failure.reason)
        self.trace = trace

    def _stop(self, end: str) -> EpisodeFailure:
        """Stop the trace, so that verifiers scores what there is; return what the request is answered with."""
        if self.trace is not None:
            self.trace.stop(end)
        return EpisodeFailure("error", f"the episode has ended ({end})")


def grade_of(played: vf.Episode) -> dict[str, Any]:
    """Return the reward that verifiers gives: the weighted sum of the task's rewards.

    Returns:
        "reward", and "parts": scores by name before they are weighted, and metrics.

    Raises:
        EpisodeFailure: The episode failed, or its reward is none: verifiers says 0 in some of these cases.
    """
    traces: Sequence[vf.Trace] = played.traces
    errors = [error for trace in traces for error in trace.errors] + list(played.errors)
    told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no reason"
    if timeout := [trace.stop_condition or "" for trace in traces if trace.is_timeout]:
        raise EpisodeFailure("deadline", f"verifiers' own limit: {timeout[0]}")
    if played.is_timeout:
        raise EpisodeFailure("deadline", told)
    if not played.ok:
        raise EpisodeFailure("error", told)
    (trace,) = traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise EpisodeFailure("error", f"no reward: {', '.join(unscored) or 'the task has none'}")
    if not math.isfinite(trace.reward):
        raise EpisodeFailure("error", f"the reward is {trace.reward}, no finite number")
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    numbers = scores | {name: value for name, value in trace.metrics.items() if value is not None}
    parts = {name: value for name, value in numbers.items() if name != "reward" and math.isfinite(value)}
    return {"reward": trace.reward, "parts": parts}
