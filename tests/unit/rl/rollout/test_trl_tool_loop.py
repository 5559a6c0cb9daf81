"""Scripted tool episodes in our loop and in that of TRL's `GRPOTrainer`: tokens, masks and rewards.

TRL's loop, templates and parsers run as they are; only its model's `generate` is replaced, by scripted tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.chat_tokenizers import GLM, QWEN3, Family, make_chat_tokenizer
from tests.support.scripted_episodes import ScriptedEpisode, play_ours, respond, segments_of
from transformers.utils import get_json_schema

from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.environments.protocol import EpisodeReward

ASKED = [{"role": "user", "content": "add 12"}]
OBSERVED = [{"role": "tool", "name": "add", "content": "42"}]
QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
REWARD = 0.75
CALL_ENDS, ANSWER = "<|im_end|>", ["1", "2", "<|im_end|>"]
GLM_ANSWER = ["<think></think>\n", "1", "2", "<|user|>"]
# Family, the pieces of each response, and a text of ours with what TRL has instead.
CASES: dict[str, tuple[Family, list[list[str]], tuple[str, str]]] = {
    "qwen3": (QWEN3, [[QWEN3_CALL, CALL_ENDS], ANSWER], ("", "")),
    "qwen3 two calls": (QWEN3, [[QWEN3_CALL, CALL_ENDS], [QWEN3_CALL, CALL_ENDS], ANSWER], ("", "")),
    # We end a turn as its template does.
    "qwen3 another stop token": (
        QWEN3,
        [[QWEN3_CALL, "<|endoftext|>"], ANSWER],
        ("<|endoftext|><|im_end|>", "<|endoftext|>"),
    ),
    # TRL appends the marker of the tool's turn although the model has sampled it.
    "glm-4.5": (
        GLM,
        [[GLM_CALL, "<|observation|>"], GLM_ANSWER],
        ("</tool_call><|observation|>", "</tool_call><|observation|><|observation|>"),
    ),
    "glm-4.5 another stop token": (GLM, [[GLM_CALL, "<|user|>"], GLM_ANSWER], ("", "")),
}


def add(a: int) -> int:
    """Add.

    Args:
        a: A number.
    """
    return 42


def play_theirs(chat: ChatTokenizer, episode: ScriptedEpisode, folder: Path) -> tuple[list[int], list[int], float]:
    """Return tokens and mask of an episode in TRL, and its reward."""
    import trl
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(chat.tokenizer), max_position_embeddings=4096, **sizes)
    model, responses = LlamaForCausalLM(config), iter(episode.responses)

    def generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor([next(responses).tokens] * len(input_ids))], dim=1)

    model.generate = generate
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [sum(episode.rewards)] * len(completions),
        tools=[add],
        args=trl.GRPOConfig(
            output_dir=str(folder),
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=1000,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": ASKED}]),
        processing_class=chat.tokenizer,
    )
    out = trainer._generate_and_score_completions([{"prompt": ASKED}] * 2)
    prompt, completion = out["prompt_ids"][0].tolist(), out["completion_ids"][0].tolist()
    rewards = next(iter(trainer._logs["rewards"].values()))
    return prompt + completion, [0] * len(prompt) + out["tool_mask"][0].tolist(), rewards[0]


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_on_and_rewarded_is_the_same(tmp_path: Path, case: str) -> None:
    family, pieces, (in_ours, in_theirs) = CASES[case]
    chat = make_chat_tokenizer(tmp_path / "tokenizer", family)
    responses = [respond(chat, *some) for some in pieces]
    observations = [OBSERVED] * (len(responses) - 1)
    rewards = [0.0] * len(observations) + [REWARD]
    episode = ScriptedEpisode(ASKED, responses, observations, rewards, [get_json_schema(add)])
    ours = play_ours(chat, episode)
    ((tokens, mask),) = segments_of(ours)
    their_tokens, their_mask, reward = play_theirs(chat, episode, tmp_path)
    assert isinstance(ours.grade, EpisodeReward)
    assert ours.grade.reward == reward == REWARD
    assert sampled(tokens, mask) == sampled(their_tokens, their_mask)
    if in_ours == in_theirs:
        assert (tokens, mask) == (their_tokens, their_mask)
    else:
        assert chat.text_of(tokens).replace(in_ours, in_theirs) == chat.text_of(their_tokens) != chat.text_of(tokens)


def sampled(tokens: list[int], mask: list[int]) -> list[int]:
    return [token for token, mark in zip(tokens, mask, strict=True) if mark]
