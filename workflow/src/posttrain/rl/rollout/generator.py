"""Keeps engines busy with groups while the trainer trains, and hands finished ones over. Runs on the trainer's rank 0.

Every trajectory is a separate request, so a group is graded, stored and queued as soon as its last response ends.
`TrajectoryQueue` decides which groups start and which ones a step trains on. A request that ends early, because its
engine got new weights or died, is asked again for the rest, with the tokens that it has; in a synchronous step it is
asked again from its beginning, so that a failure changes no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.config.derived import is_off_policy, runs_ahead, share_of, takes_turns
from posttrain.config.schema import Config
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.mixture import PromptMix
from posttrain.rl.engines.calls import EngineError, NoAnswerError
from posttrain.rl.engines.client import EngineClient, GenerateRequest, GenerateResult
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.environments.protocol import EnvironmentFailure, Environments
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import check_failures
from posttrain.rl.rollout.episode import Episode, EpisodeRunner
from posttrain.rl.rollout.group_builder import GroupBuilder, has_equal_rewards, has_failures, without_columns
from posttrain.rl.rollout.length_history import LengthHistory
from posttrain.rl.rollout.partial_response import ABORTED, PartialResponse
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.trajectory_queue import TrajectoryQueue
from posttrain.types import Prompt, RolloutResult, TrajectoryGroup

log = logging.getLogger(__name__)
# For what was cancelled to end.
CLOSE_SECONDS = 5.0
# A parser that refuses a text refuses it again; an engine may refuse one while it starts.
MOST_REFUSALS = 2
# Why groups are dropped.
EQUAL_REWARDS, NO_ENVIRONMENT = "equal_rewards", "no_environment"


class _Background:
    """The tasks of groups that are generated, and what they met that the trainer has to hear of."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.changed, self.has_engines = asyncio.Event(), asyncio.Event()
        self.engine_failure = ""
        self.error: BaseException | None = None

    def raise_any(self) -> None:
        """Raise an error, or an engine's failure, once."""
        if self.error:
            raise self.error
        failure, self.engine_failure = self.engine_failure, ""
        if failure:
            raise EngineError(failure)


class TrajectoryGenerator:
    """Makes the rollouts of all steps, ahead of the trainer where `rollout.max_staleness` allows it.

    All methods run in one event loop.

    Args:
        config: The resolved configuration.
        prompts: The training prompts; their order is a function of the seed.
        tokenizer: Renders prompts and decodes responses.
        client: Client of the engines.
        store: Groups on disk.
        graders: Grade responses.
        environments: What the model acts in; None if a prompt has one response.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        tokenizer: ChatTokenizer,
        client: EngineClient,
        store: QueueStore,
        graders: GraderPool,
        environments: Environments | None = None,
    ):
        self._config, self._client, self._store = config, client, store
        self._builder = GroupBuilder(config, tokenizer, graders)
        self._runner = (
            EpisodeRunner(config, tokenizer, environments, self._parse_calls, routes=self._builder.routes)
            if environments
            else None
        )
        self._mix = PromptMix(prompts, config.data)
        self._lengths = LengthHistory(self._mix)
        self._queue = TrajectoryQueue.of(config)
        self._ready: dict[int, TrajectoryGroup] = {}
        self._num_responses = 0  # being generated
        self._background = _Background()
        self._is_closed = False

    async def close(self) -> None:
        """End what still runs; what it uses may be closed then."""
        self._is_closed = True
        running = [*self._background.tasks]
        for task in running:
            task.cancel()
        if running:  # an environment may be in a call that cannot be cancelled, and ends with its process
            await asyncio.wait(running, timeout=CLOSE_SECONDS)

    async def begin(self, finished: int) -> None:
        """Go on after `finished` steps: take over what earlier attempts stored, and start groups."""
        taken = self._store.taken_from(finished)
        # Steps that are taken again lead to these weights; the weights of later versions are lost.
        newest = finished + len(taken)
        # Groups dropped for those steps stay dropped: their records list them and are not rewritten.
        done = self._store.read_done(newest)
        self._queue = TrajectoryQueue.of(self._config, finished, done, self._lengths.expected)
        for step, positions in taken.items():
            self._queue.reserve(step, positions)
        for group in self._store.read_groups():
            if self._queue.is_open(group.position) and self._is_wanted(group, newest):
                self._queue.add_ready(group.position, group.oldest_version or 0)
                self._ready[group.position] = group
                self._lengths.note(group)
            else:
                self._store.forget_group(group.position)
        self._background.has_engines.set()
        if runs_ahead(self._config):
            self._start_groups()

    async def collect(self, step: int) -> RolloutResult:
        """Return the groups that a step trains on, once the queue has them; they are on disk then.

        Args:
            step: From 0.

        Raises:
            EngineError: An engine failed. Its requests went to the others, or wait until `resume`.
            RuntimeError: Graders failed too often, or a token is from weights that the engines did not have.
        """
        positions = await (self._rollout_in_turn(step) if takes_turns(self._config) else self._rollout_awake(step))
        if self._queue.is_reserved(step):
            self._queue.take(step, positions)
            groups = self._store.read_step(step, len(positions))
            return RolloutResult(groups, num_replayed=len(groups))
        groups = [self._ready[position] for position in positions]
        failures = [trajectory.failure for group in groups for trajectory in group.trajectories]
        check_failures(failures, self._config.reward.max_failure_share)
        state = self._queue.state
        self._queue.take(step, positions)
        groups = await asyncio.to_thread(self._store.take, step, groups, self._queue.done)
        for position in positions:
            del self._ready[position]
        if runs_ahead(self._config):
            self._start_groups()
        return RolloutResult(groups, num_replayed=0, queue=state)

    async def _rollout(self, step: int) -> list[int]:
        """Generate until a step has its groups; returns their positions."""
        self._start_groups()
        while (positions := self._queue.choose(step)) is None:
            self._background.raise_any()
            self._background.changed.clear()
            await self._background.changed.wait()
        self._background.raise_any()
        return positions

    async def _rollout_awake(self, step: int) -> list[int]:
        """Return a step's positions from engines that stay awake."""
        try:
            return await self._rollout(step)
        except EngineError:
            # A turn that is asked for while the weights are sent again waits; engines that run ahead are paused then.
            if not runs_ahead(self._config):
                with contextlib.suppress(EngineError):  # the first error says why
                    await self._client.pause("abort")
            raise

    async def _rollout_in_turn(self, step: int) -> list[int]:
        """Return a step's positions from engines that sleep afterwards: requests that still run go on in the next."""
        self._background.engine_failure = ""  # of an engine that has been replaced since
        await self._client.resume()
        try:
            positions = await self._rollout(step)
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error says why
                await self._client.pause("abort")
            raise
        await self._client.pause("abort")
        return positions

    async def pause(self) -> None:
        """Stop running requests where engines can get new weights, as `rollout.on_new_weights` says."""
        await self._client.pause(self._config.rollout.on_new_weights)

    async def resume(self, version: int) -> None:
        """Go on with new weights, which all engines have."""
        self._queue.version = version
        self._background.engine_failure = ""  # of an engine that has been replaced since
        self._background.has_engines.set()
        if not takes_turns(self._config):
            await self._client.resume()
        if runs_ahead(self._config):
            self._start_groups()

    def _start_groups(self) -> None:
        """Start as many groups as the queue allows and the engines have free places for."""
        if self._is_closed:
            return
        size, engine = self._config.rollout.num_samples_per_prompt, self._config.engine
        most = max(size, engine.num_engines * engine.max_running_requests)
        while self._num_responses + size <= most and (position := self._queue.start()) is not None:
            self._num_responses += size
            task = asyncio.create_task(self._generate(position))
            self._background.tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._background.error = error
        else:
            self._start_groups()
        self._background.changed.set()

    async def _generate(self, position: int) -> None:
        """Generate, grade and store the group at a position, and put it into the queue."""
        (prompt,) = self._mix.take(position, 1)
        try:
            episodes = await self._episodes(position, prompt)
        except EnvironmentFailure as failure:
            self._drop_not_started(position, failure)
            return
        (group,) = await self._builder.grade([prompt], episodes)
        group = dataclasses.replace(group, position=position)
        self._lengths.note(group)
        if self._config.rollout.dynamic_sampling and has_equal_rewards(group) and self._queue.may_drop(EQUAL_REWARDS):
            self._queue.drop(position, EQUAL_REWARDS)
            return
        oldest = self._checked(group)
        group = await asyncio.to_thread(self._with_stored_routes, group, episodes)
        # Stored groups are not graded again, so the limit on grader failures decides about this one later.
        if not has_failures([group]):
            await asyncio.to_thread(self._store.write_group, group)
        self._ready[position] = group
        self._queue.add_ready(position, oldest)

    async def _episodes(self, position: int, prompt: Prompt) -> list[Episode]:
        """Return a finished episode for each trajectory of a group.

        Raises:
            EnvironmentFailure: One could not begin; the others have ended then.
        """
        requests = [] if self._runner else self._builder.requests(prompt, _tag(position), prompt.prompt_id)
        count = self._config.rollout.num_samples_per_prompt
        played = await asyncio.gather(
            *(self._episode(position, prompt, index, requests) for index in range(count)), return_exceptions=True
        )
        # A failed environment costs the group; anything else ends the run.
        errors = sorted((one for one in played if isinstance(one, BaseException)), key=_is_environment_failure)
        for error in errors:
            raise error
        return [one for one in played if isinstance(one, Episode)]

    async def _episode(self, position: int, prompt: Prompt, index: int, requests: Sequence[GenerateRequest]) -> Episode:
        """Return a finished episode, and free its place for others."""
        respond = partial(self._respond, position, prompt.prompt_id, index)
        try:
            if not self._runner:
                return Episode.of_response(requests[index].input_ids, await respond(0, requests[index], None))
            seed = sampling_seed(self._config.training.seed, f"{_tag(position)}, environment", prompt.prompt_id, index)
            return await self._runner.play(prompt, seed, respond)
        finally:
            self._num_responses -= 1
            self._start_groups()

    def _drop_not_started(self, position: int, failure: EnvironmentFailure) -> None:
        """Drop a group whose environment cannot begin; too many end the run."""
        self._queue.drop(position, NO_ENVIRONMENT)
        share, size = self._config.reward.max_failure_share, self._config.rollout.rollout_batch_size
        most = max(1, int(share_of(share, size)))
        count = self._queue.num_dropped(NO_ENVIRONMENT)
        if count > most:
            raise RuntimeError(
                f"environments of {count} groups could not begin in one step, more than reward.max_failure_share "
                f"allows; the last: {failure}\n  Mend the environment and run again."
            )
        log.warning("the group at position %d is left out: %s", position, failure)

    async def _respond(
        self, position: int, prompt_id: int, index: int, turn: int, request: GenerateRequest, engine: int | None
    ) -> GenerateResult:
        """Return a complete response, of as many requests as it takes."""
        tag = f"{_tag(position)}, turn {turn}" if turn else _tag(position)
        response, num_answers = PartialResponse(engine=engine), 0
        while response.finish_reason == ABORTED:
            seed = sampling_seed(self._config.training.seed, tag, prompt_id, index, num_answers)
            try:
                result = await self._client.sample(response.rest_of(request, seed), response.engine)
            except EngineError as error:
                await self._wait_for_engines(error)
                continue
            # In a synchronous step the weights stay, so an interrupted response is sampled again from its own seed.
            if result.finish_reason != ABORTED or is_off_policy(self._config):
                response.add(result)
                num_answers += 1
        return response.as_result()

    async def _parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Parse calls on an engine, on another one if it does not answer.

        Raises:
            EnvironmentFailure: Engines refuse the text or the tools.
        """
        num_refused = 0
        while True:
            try:
                return await self._client.parse_tool_calls(text, tools, parser)
            except NoAnswerError as error:
                await self._wait_for_engines(error)
            except EngineError as error:
                num_refused += 1
                if num_refused == MOST_REFUSALS:
                    raise EnvironmentFailure("error", f"tool calls cannot be parsed: {error}") from error

    async def _wait_for_engines(self, error: EngineError) -> None:
        """Tell the trainer that an engine failed; return once a request may be sent again, to another one or later."""
        log.warning("an engine has failed; its requests are sent again: %s", error)
        self._background.engine_failure = str(error)
        self._background.changed.set()
        # Only an engine that does not answer is left out of what follows; any other would fail again at once.
        if not (isinstance(error, NoAnswerError) and self._client.can_sample):
            self._background.has_engines.clear()
        await self._background.has_engines.wait()

    def _with_stored_routes(self, group: TrajectoryGroup, episodes: Sequence[Episode]) -> TrajectoryGroup:
        """Store the expert routes of a group's episodes, if there are any, and return the group with them."""
        stored = self._store.write_group_routes(group.position, [episode.routes for episode in episodes])
        both = zip(group.trajectories, stored, strict=True)
        return dataclasses.replace(group, trajectories=tuple(dataclasses.replace(one, routes=at) for one, at in both))

    def _checked(self, group: TrajectoryGroup) -> int:
        """Return a group's oldest version; reject a version that no engine of this run has had."""
        spans = [span.version for trajectory in group.trajectories for span in trajectory.versions]
        known = [version for version in spans if version is not None and 0 <= version <= self._queue.version]
        wrong = {str(version) for version in spans} - {*map(str, known)}
        if wrong:
            raise RuntimeError(f"engines served weight versions {sorted(wrong)}; the newest is {self._queue.version}")
        return min(known)

    def _is_wanted(self, group: TrajectoryGroup, newest: int) -> bool:
        """Return whether a stored group is of this run's weights and has the prompt of its position."""
        (prompt,) = self._mix.take(group.position, 1)
        size = self._config.rollout.num_samples_per_prompt
        is_known = all((one.newest_version or 0) <= newest for one in group.trajectories)
        return is_known and (group.prompt, len(group.trajectories)) == (without_columns(prompt), size)


def _is_environment_failure(error: BaseException) -> bool:
    return isinstance(error, EnvironmentFailure)


def _tag(position: int) -> str:
    """Return what seeds have in place of a step: a position of the queue is unique in the run."""
    return f"position {position}"
