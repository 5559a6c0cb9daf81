"""The section `environment`: an agent's turns, and the processes of its environments (docs/environments.md)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc

# The tool call parser that needs no engine.
OWN_PARSER = "json"
# Those of SGLang 0.5.23.
SGLANG_PARSERS = (
    *("apertus2509", "beam", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4"),
    *("deepseekv41", "dots", "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47", "gpt-oss", "hermes"),
    *("hunyuan", "inkling", "interns1", "iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3"),
    *("mimo", "minicpm5", "minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige", "poolside_v1", "pythonic"),
    *("qwen", "qwen25", "qwen3_coder", "response_template", "spark25", "step3", "step3p5", "trinity"),
)
# Programs of one message that the environment `python` runs, one after the other.
MAX_PROGRAMS = 4


@dataclass(frozen=True)
class EnvironmentSettings:
    """Limits of an episode; `data.environment` names the environment."""

    max_turns: int = _doc("Responses in an episode, at most", 16, minimum=1, unnamed=16)
    max_turn_tokens: int = _doc(
        "Maximum tokens of one response; 0: rollout.max_response_tokens, the limit for everything after the first "
        "prompt, is the only one",
        0,
        minimum=0,
        unnamed=0,
    )
    deadline_seconds: float = _doc(
        "Time limit of one call of an environment; then its process is killed", 60.0, exclusive_minimum=0, unnamed=ANY
    )
    history: str = _doc(
        "Where the chat template rewrites earlier turns, for example without their thinking: keep what was sampled, or "
        "train on segments, each of which is a prompt as the template renders it",
        "keep",
        choices=("keep", "template"),
        unnamed="keep",
    )
    tool_call_parser: str = _doc(
        "Reads tool calls in responses: json (calls in <tool_call> tags), or a parser of SGLang's such as glm47",
        OWN_PARSER,
        unnamed=OWN_PARSER,
    )
    num_workers: int = _doc("Processes that environments run in", 2, minimum=1, unnamed=ANY)
    memory_gib: float = _doc("Memory limit of such a process", 4.0, exclusive_minimum=0, unnamed=ANY)
    digest: str = _doc(
        "Digest of your own environment, which data.environment names; filled in when a configuration is resolved",
        "",
        unnamed="",
    )
