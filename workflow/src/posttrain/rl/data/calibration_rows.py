"""Generates conversations for calibration passes from a seed, without network access.

They are small stand-ins for real traffic, of three kinds:

    coding   several turns with tools, their calls and results, system prompts in English and Chinese
    broad    questions and answers on many topics in nine languages
    deep     a question about a long context: modules, logs and minutes, some 70,000 characters

Real users' conversations, if available, are better (`serving.passes`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.rl.data.rows import Row

# More than 8,192 tokens with any tokenizer of fewer than eight characters per token.
DEEP_CHARACTERS = 70_000
_WORDS = (
    *(
        "queue",
        "ledger",
        "sensor",
        "invoice",
        "packet",
        "grid",
        "tenant",
        "cursor",
        "basket",
        "orbit",
        "token",
        "route",
    ),
    *("shard", "beacon", "harvest", "signal", "bridge", "archive", "parcel", "column", "window", "turbine", "cell"),
)
_VERBS = ("merge", "count", "filter", "encode", "schedule", "validate", "rotate", "compress", "sort", "resolve")
_TYPES = ("int", "float", "str", "list[int]", "dict[str, int]")
_SYSTEM = (
    "You are a careful software engineer. Use the tools to read and change the repository, and run the tests.",
    "你是一名严谨的软件工程师。请使用工具阅读和修改代码仓库，并运行测试，最后用中文说明你的改动。",
)
_TOOLS = (
    ("read_file", "Return the text of a file", {"path": "string"}),
    ("write_file", "Replace the text of a file", {"path": "string", "text": "string"}),
    ("run_tests", "Run the tests that match a pattern", {"pattern": "string"}),
    ("search", "Find a word in all files", {"word": "string", "limit": "integer"}),
)
# Question and answer, with placeholders for a topic word and two numbers.
_BROAD = (
    (
        "How does a {a} keep a {b} from overflowing when {m} of them arrive within {n} minutes?",
        "It limits how many are taken at once: with {m} arrivals in {n} minutes, the {a} lets some {q} a minute pass.",
    ),
    (
        "Write a short poem about a {a} that has lost its {b}.",
        "The {a} stood still in the morning light,\nits {b} had left in the quiet night.",
    ),
    (
        "Erkläre mir in zwei Sätzen, was {m} mal {n} ergibt und wozu man ein {a} braucht.",
        "{m} mal {n} ist {p}. Ein {a} hält zusammen, was sonst einzeln gezählt würde.",
    ),
    (
        "¿Cuántas horas son {m} días y {n} horas? Responde con el cálculo.",
        "{m} días son {h} horas; con {n} horas más son {t} horas.",
    ),
    (
        "Combien coûtent {n} billets à {m} euros, et que veut dire « {a} » ?",
        "{n} billets à {m} euros coûtent {p} euros. « {a} » désigne ici un objet technique.",
    ),
    ("请用一句话解释什么是 {a}，并计算 {m} 加 {n}。", "{a} 是系统中的一个部件；{m} 加 {n} 等于 {s}。"),
    (
        "{a} と {b} の違いを説明し、{m} × {n} を計算してください。",
        "{a} と {b} は役割が違います。{m} × {n} = {p} です。",
    ),
    ("Сколько будет {m} минус {n}? И что такое {a}?", "{m} минус {n} будет {d}. {a} — это часть большой системы."),
    ("كم يساوي {m} زائد {n}؟ وما معنى {a}؟", "{m} زائد {n} يساوي {s}. و{a} جزء من نظام أكبر."),
    (
        "Quanto é {m} vezes {n}? Dê também um exemplo com {b}.",
        "{m} vezes {n} é {p}. Por exemplo, {m} {b} em cada caixa.",
    ),
)


def make_conversations(which: str, count: int, seed: int = 0) -> list[Row]:
    """Return conversations of one built-in set; deterministic for a seed.

    Args:
        which: "coding", "broad" or "deep".
        count: Number of conversations.
        seed: Random seed; the global random state is neither read nor changed.
    """
    make: Mapping[str, Callable[[random.Random], Row]] = {"coding": _coding, "broad": _broad, "deep": _deep}
    draw = random.Random(f"{which} {seed}")
    return [make[which](draw) for _ in range(count)]


# ---- coding with tool calls ----


def _coding(draw: random.Random) -> Row:
    name, function = f"{draw.choice(_WORDS)}s", _function(draw)
    path, title = f"src/{name}.py", function.splitlines()[0]
    mended = function.replace("result = start", "result = start or 0")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw.choice(_SYSTEM)},
        {
            "role": "user",
            "content": f"The test of `{title}` in {path} fails with an empty list. Find out why and fix it.",
        },
        *_call(draw, "read_file", {"path": path}, function),
        *_call(draw, "run_tests", {"pattern": name}, f"FAILED tests/test_{name}.py::test_empty - TypeError: NoneType"),
        *_call(draw, "write_file", {"path": path, "text": mended}, "written"),
        *_call(draw, "run_tests", {"pattern": name}, f"{draw.randrange(3, 40)} passed in {draw.random():.2f}s"),
        {
            "role": "assistant",
            "content": f"`start` was None there. It is now:\n\n```python\n{mended}```\nAll tests pass.",
        },
    ]
    return Row(tuple(messages), None, {}, _tools(draw))


def _function(draw: random.Random) -> str:
    verb, one, other = draw.choice(_VERBS), draw.choice(_WORDS), draw.choice(_WORDS)
    limit, step, kind = draw.randrange(2, 900), draw.randrange(1, 9), draw.choice(_TYPES)
    lines = [
        f"def {verb}_{one}(values: list[int], start: int | None = None) -> {kind}:",
        f'    """{verb.capitalize()} every {step}. {one} below {limit} of a {other}."""',
        "    result = start",
        f"    for place, value in enumerate(values[::{step}]):",
        f"        if value < {limit} and place % {draw.randrange(2, 7)} == 0:",
        f"            result = result + value * {draw.randrange(1, 99)}",
        f"    return {kind.partition('[')[0]}({one}_of(result, {other!r}))",
    ]
    return "\n".join(lines) + "\n"


def _call(draw: random.Random, tool: str, arguments: Mapping[str, Any], result: str) -> list[dict[str, Any]]:
    number = f"call_{draw.randrange(10**9):09}"
    call = {"id": number, "type": "function", "function": {"name": tool, "arguments": dict(arguments)}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": number, "name": tool},
    ]


def _tools(draw: random.Random) -> list[dict[str, Any]]:
    def schema(name: str, does: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        properties = {key: {"type": kind, "description": f"The {key}"} for key, kind in parameters.items()}
        asked = {"type": "object", "properties": properties, "required": list(parameters)}
        return {"type": "function", "function": {"name": name, "description": does, "parameters": asked}}

    return [schema(*tool) for tool in draw.sample(_TOOLS, len(_TOOLS))]


# ---- broad ----


def _broad(draw: random.Random) -> Row:
    messages: list[dict[str, Any]] = []
    for question, answer in draw.sample(_BROAD, draw.randrange(1, 4)):
        m, n = draw.randrange(20, 500), draw.randrange(2, 20)
        sums = {"q": m // n, "p": m * n, "h": 24 * m, "t": 24 * m + n, "s": m + n, "d": m - n}
        filled = {"a": draw.choice(_WORDS), "b": draw.choice(_WORDS), "m": m, "n": n, **sums}
        messages.append({"role": "user", "content": question.format(**filled)})
        messages.append({"role": "assistant", "content": answer.format(**filled)})
    return Row(tuple(messages), None)


# ---- deep ----


def _deep(draw: random.Random) -> Row:
    kinds: Sequence[Callable[[random.Random], str]] = (_module, _log, _minutes, _table)
    parts, length = list[str](), 0
    while length < DEEP_CHARACTERS:
        parts.append(f"# Document {len(parts) + 1}\n\n{draw.choice(kinds)(draw)}")
        length += len(parts[-1])
    asked = draw.randrange(1, len(parts) + 1)
    messages = (
        {"role": "system", "content": draw.choice(_SYSTEM)},
        {"role": "user", "content": "\n".join(parts) + f"\n\nWhat does document {asked} say? Quote its last line."},
        {"role": "assistant", "content": f"It ends with: {parts[asked - 1].splitlines()[-1]}"},
    )
    return Row(messages, None)


def _module(draw: random.Random) -> str:
    return "\n\n".join(_function(draw) for _ in range(draw.randrange(3, 9)))


def _log(draw: random.Random) -> str:
    def line(second: int) -> str:
        level, word = draw.choice(("INFO", "WARNING", "ERROR")), draw.choice(_WORDS)
        took = f"{draw.choice(_VERBS)} of {draw.randrange(9999)} took {draw.random() * 9:.3f} s"
        return f"2026-03-{draw.randrange(1, 29):02}T{second // 60 % 24:02}:{second % 60:02} {level} {word}: {took}"

    return "\n".join(line(second) for second in range(draw.randrange(10, 60)))


def _minutes(draw: random.Random) -> str:
    def sentence() -> str:
        one, other, verb = draw.choice(_WORDS), draw.choice(_WORDS), draw.choice(_VERBS)
        return f"The team decides to {verb} the {one} before the {other} grows beyond {draw.randrange(10, 9999)}."

    return " ".join(sentence() for _ in range(draw.randrange(8, 40)))


def _table(draw: random.Random) -> str:
    rows = [{draw.choice(_WORDS): draw.randrange(10**6) for _ in range(4)} for _ in range(draw.randrange(5, 30))]
    return "\n".join(json.dumps(row) for row in rows)
