"""Loads an environment of verifiers whose one agent is ours, and writes its tasks as rows of data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.env import Env
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.task import Task, TaskData
from verifiers.v1.utils.loaders import (
    default_harness_id,
    harness_config_type,
    load_environment,
    load_taskset,
    resolve_env_config,
)

from posttrain_verifiers.conversation import text_message
from posttrain_verifiers.harness import first_messages

HARNESS = "posttrain_verifiers"
# What an agent without a harness of its own gets; a taskset that brings one relies on its tools.
DEFAULT_HARNESS = "bash"
# The row's column with the task, as verifiers sends it to its own servers.
TASK = "verifiers_task"
# Verifiers counts tokens from what an engine says, and is told nothing.
UNKNOWN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")


def config_of(taskset: str, words: Sequence[str]) -> EnvConfig:
    """Return the configuration of an environment, with our harness in its only seat.

    Args:
        taskset: Name of an installed taskset, such as "textarena".
        words: Verifiers' own keys, "taskset.game=Hangman-v0"; values are JSON, or else texts.

    Raises:
        ValueError: A key or a value is wrong, or the environment has no seat that our harness can play.
    """
    content: dict[str, Any] = {}
    for word in words:
        path, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{word!r} is no KEY=VALUE")
        *folders, name = path.split(".")
        place = content
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = _value(value)
    content["taskset"] = {**content.get("taskset", {}), "id": taskset}
    config = resolve_env_config(content)
    seats = agent_config_fields(config)
    if len(seats) != 1:
        raise ValueError(f"{taskset} has the agents {', '.join(seats) or 'none'}; only one can be played")
    ((seat, agent),) = seats.items()
    return config.model_copy(update={seat: _seated(agent, taskset), "retries": RetryConfig()})


def make_environment(config: EnvConfig) -> Env:
    """Return the environment.

    Raises:
        ValueError: Its tasks cannot be sent as JSON.
    """
    environment = load_environment(config)
    data = type(environment.taskset).task_type().data_type()
    if excluded := [name for name, field in data.model_fields.items() if field.exclude]:
        left_out = ", ".join(excluded)
        raise ValueError(f"{data.__name__} leaves {left_out} out of its JSON, so that rows have no such field")
    return environment


def task_of(environment: Env, row: Mapping[str, Any]) -> Task:
    """Return the task of a row, as verifiers' own server does.

    Raises:
        ValueError: The row has none, or that of another taskset.
    """
    if not isinstance(content := row.get(TASK), Mapping):
        raise ValueError(f"the row has no {TASK}; write rows with `python -m posttrain_verifiers rows`")
    kind = type(environment.taskset).task_type()
    return kind(kind.data_type().model_validate(content), environment.config.taskset.task)


def rows_of(config: EnvConfig, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a taskset as rows.

    Args:
        config: The environment's.
        limit: Of rows.

    Raises:
        ValueError: The taskset has no end and no limit is given, or a prompt has more than text.
    """
    taskset = load_taskset(config.taskset)
    if limit is None and not taskset.bounded:
        raise ValueError(f"{config.taskset.id} has no end; say how many rows you want with --limit")
    for task in taskset if limit is None else taskset.take(limit):
        name = task.data.name or task.key
        messages = list(map(text_message, first_messages(task.data.system_prompt, task.data.prompt)))
        yield {
            # A task without a prompt is opened by its environment: the first message comes with `reset`.
            "prompt": messages or [{"role": "user", "content": name}],
            "label": name,
            TASK: _content(task.data),
        }


def _content(data: TaskData) -> dict[str, Any]:
    return data.model_dump(mode="json")


def _seated(agent: AgentConfig, taskset: str) -> AgentConfig:
    """Return the seat's configuration with our harness and the model that asks posttrain."""
    wanted = agent.harness.id if agent.harness is not None else default_harness_id(taskset)
    if wanted not in (DEFAULT_HARNESS, HARNESS):
        raise ValueError(f"{taskset} is played by the harness {wanted}; only tasksets for any chat can be served")
    if given := [name for name in UNKNOWN_LIMITS if getattr(agent, name) is not None]:
        raise ValueError(f"{', '.join(given)}: set environment.max_turn_tokens and rollout.max_response_tokens instead")
    harness = harness_config_type(HARNESS).model_validate({"id": HARNESS})
    # Otherwise a sandbox in a cloud.
    runtime = agent.runtime if "runtime" in agent.model_fields_set else SubprocessConfig()
    return agent.model_copy(
        update={"harness": harness, "runtime": runtime, "model": None, "client": None, "retries": RetryConfig()}
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
