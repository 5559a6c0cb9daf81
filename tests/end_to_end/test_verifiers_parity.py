"""Scripted episodes in our loop and in verifiers 0.4.0: tokens, masks, log-probabilities and rewards."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_tokenizers import GLM, QWEN3, make_chat_tokenizer
from tests.support.requirements import require
from tests.support.scripted_episodes import ScriptedEpisode, play_ours, respond, segments_of
from tests.support.workflow_runs import ROOT

from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.environments.protocol import EpisodeReward

pytestmark = pytest.mark.faults("environments")
ENVIRONMENTS = Path(os.environ.get("POSTTRAIN_ENVIRONMENTS") or ROOT / ".envs" / "environments")
ASKED = [{"role": "user", "content": "add 12"}]
MORE = [{"role": "user", "content": "more 12"}]
TOOL = [{"role": "tool", "content": "42", "tool_call_id": "call_0"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


def episodes_of_qwen3(chat: ChatTokenizer) -> dict[str, ScriptedEpisode]:
    end, think = "<|im_end|>", "<think>\n3\n</think>\n\n"
    # `12` is sampled as two tokens, where the tokenizer would write one.
    said, called = respond(chat, "1", "2", end), respond(chat, QWEN3_CALL, end)
    return {
        "tool": ScriptedEpisode(ASKED, [called, said], [TOOL], [0.5, 1.0], TOOLS),
        "two tools": ScriptedEpisode(ASKED, [called, called, said], [TOOL, TOOL], [0.25, 0.5, 1.0], TOOLS),
        "two user turns": ScriptedEpisode(ASKED, [said, said], [MORE], [-0.5, 1.0]),
        "thinking": ScriptedEpisode(ASKED, [respond(chat, think, "1", "2", end), said], [MORE], [0.0, 1.0]),
        "another stop token": ScriptedEpisode(
            ASKED, [respond(chat, QWEN3_CALL, "<|endoftext|>"), said], [TOOL], [0.0, 1.0], TOOLS
        ),
    }


def episodes_of_glm(chat: ChatTokenizer) -> dict[str, ScriptedEpisode]:
    no_think, think = "<think></think>\n", "<think>3</think>\n"
    said, called = respond(chat, no_think, "1", "2", "<|user|>"), respond(chat, no_think, GLM_CALL, "<|observation|>")
    return {
        "tool": ScriptedEpisode(ASKED, [called, said], [TOOL], [0.5, 1.0], TOOLS),
        "two user turns": ScriptedEpisode(ASKED, [said, said], [MORE], [-0.5, 1.0]),
        "thinking": ScriptedEpisode(ASKED, [respond(chat, think, "1", "2", "<|user|>"), said], [MORE], [0.0, 1.0]),
        "another stop token": ScriptedEpisode(
            ASKED, [respond(chat, no_think, GLM_CALL, "<|user|>"), said], [TOOL], [0.0, 1.0], TOOLS
        ),
    }


FAMILIES = {"qwen3": (QWEN3, episodes_of_qwen3), "glm-4.5": (GLM, episodes_of_glm)}
# Renderers keep what was sampled across user turns only if they are told to.
HISTORIES: dict[str, dict[str, str]] = {"keep": {"thinking_retention": "all"}, "template": {}}
# Where the sequences are not the same: how many are ours, how many theirs, and why.
DIFFERENT = {
    "qwen3 keep another stop token": (1, 1, "we end a turn as its template does, they leave it at <|endoftext|>"),
    "qwen3 template another stop token": (2, 1, "we ask whether the text is the template's, they whether thinking is"),
    "qwen3 template two user turns": (1, 2, "they begin anew at a user's turn, also where nothing is rewritten"),
    "glm-4.5 template tool": (2, 1, "the template writes a line break before <think></think>, the model after it"),
    "glm-4.5 template another stop token": (2, 1, "the same"),
}
EQUAL = {
    *(f"qwen3 {history} {name}" for history in HISTORIES for name in ("tool", "two tools", "thinking")),
    *(f"glm-4.5 {history} {name}" for history in HISTORIES for name in ("two user turns", "thinking")),
    "qwen3 keep two user turns",
    "glm-4.5 keep tool",
    "glm-4.5 keep another stop token",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTokenizer, ScriptedEpisode, dict]]:
    """All episodes with both policies of thinking, and verifiers' record of each."""
    python = ENVIRONMENTS / "verifiers/bin/python"
    require("environments", "" if (ENVIRONMENTS / "verifiers/.ready").exists() else f"{python} is not there")
    asked: dict[str, tuple[ChatTokenizer, ScriptedEpisode]] = {}
    script: list[dict[str, Any]] = []
    for family, (tokens, episodes) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        chat = make_chat_tokenizer(folder, tokens)
        for history, retention in HISTORIES.items():
            place = {"folder": str(folder), "renderer": {"name": family, **retention}}
            for name, episode in episodes(chat).items():
                asked[f"{family} {history} {name}"] = chat, episode
                script.append(episode.as_json() | place)
    # A second conversation goes on after the first response of the last episode.
    chat, episode = asked["forked"] = chat, replace(episode, responses=[*episode.responses, episode.responses[-1]])
    script.append(episode.as_json() | place | {"fork": [{**TOOL[0], "content": "43"}]})
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(script))
    program = [python, ROOT / "tests/support/verifiers_player.py", path]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert all((record["ok"], record["errors"]) == (True, []) for record in records)
    return {key: (*asked[key], record) for key, record in zip(asked, records, strict=True)}


@pytest.mark.parametrize("key", sorted(EQUAL | {*DIFFERENT}))
def test_what_is_sampled_and_rewarded_is_the_same(played: dict, key: str) -> None:
    chat, episode, theirs = played[key]
    ours = play_ours(chat, episode, key.split()[1])
    samples = [zip(b["tokens"], b["logprobs"], b["mask"], strict=True) for b in theirs["branches"]]
    sampled = [(token, logprob) for branch in samples for token, logprob, mark in branch if mark]
    trained = [token for token, mark in zip(ours.tokens, ours.loss_mask, strict=True) if mark]
    assert sampled == list(zip(trained, ours.logprobs, strict=True))
    assert ours.logprobs == episode.logprobs
    assert isinstance(ours.grade, EpisodeReward)
    assert theirs["reward"] == ours.grade.reward == sum(episode.rewards)


@pytest.mark.parametrize("key", sorted(EQUAL))
def test_sequences_are_the_same(played: dict, key: str) -> None:
    chat, episode, theirs = played[key]
    ours = segments_of(play_ours(chat, episode, key.split()[1]))
    assert [(branch["tokens"], branch["mask"]) for branch in theirs["branches"]] == ours


@pytest.mark.parametrize("key", DIFFERENT)
def test_where_sequences_differ(played: dict, key: str) -> None:
    chat, episode, theirs = played[key]
    ours = segments_of(play_ours(chat, episode, key.split()[1]))
    counts = (len(ours), len(theirs["branches"]))
    assert counts == DIFFERENT[key][:2]
    if counts == (1, 1):
        (tokens, _), (branch,) = ours[0], theirs["branches"]
        assert chat.text_of(tokens).replace("<|endoftext|><|im_end|>", "<|endoftext|>") == chat.text_of(
            branch["tokens"]
        )


def test_what_their_records_lack(played: dict) -> None:
    """Facts that the decision for our own loop names."""
    _, episode, theirs = played["qwen3 keep tool"]
    assert not theirs["names_versions"], "the endpoint names a version with every answer"
    assert tuple(theirs["rounded"]) == tuple(round(value, 4) for value in episode.logprobs) != episode.logprobs


def test_their_forks_train_a_shared_response_twice(played: dict) -> None:
    _, episode, theirs = played["forked"]
    assert len(theirs["branches"]) == 2
    trained = sum(sum(branch["mask"]) for branch in theirs["branches"])
    shared = len(episode.responses[0].tokens)
    assert trained == sum(len(response.tokens) for response in episode.responses) + shared
