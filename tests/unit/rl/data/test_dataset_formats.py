"""Public forms (`forms/README.md` says whose), read by `datasets` and by us alike, whole and broken."""

import copy
import json
import re
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from posttrain.rl.data.dataset_formats import FORMS, NoLabelError, after_hashes, last_boxed, recognise
from posttrain.rl.data.raw_rows import read_raw
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import describe_bad_rows, read_rows

FOLDER = Path(__file__).parent / "forms"
# File -> form, and where its prompt and label lie, said once more in the dataset's own terms.
CASES = {
    "own": ("prompt and label", lambda row: (row["prompt"], row["label"])),
    "verl": ("verl", lambda row: (row["prompt"], row["reward_model"]["ground_truth"])),
    "dapo_math_17k": ("DAPO-Math-17k", lambda row: (row["prompt"], row["reward_model"]["ground_truth"])),
    "gsm8k": ("GSM8K", lambda row: (row["question"], row["answer"].split("\n#### ")[1].replace(",", ""))),
    "openr1_math_220k": ("OpenR1-Math-220k", lambda row: (row["problem"], row["answer"])),
    "numinamath_1_5": ("NuminaMath-1.5", lambda row: (row["problem"], row["answer"])),
    "numinamath_cot": (
        "NuminaMath-CoT",
        lambda row: (row["problem"], re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})+)\}", row["solution"])[-1]),
    ),
    "deepscaler_preview": ("DeepScaleR-Preview", lambda row: (row["problem"], row["answer"])),
    "trl_prompt_completion": ("TRL prompt-completion", lambda row: (row["prompt"], row["completion"])),
    "trl_prompt_completion_conversational": (
        "TRL prompt-completion",
        lambda row: (row["prompt"], row["completion"][0]["content"]),
    ),
    "trl_messages": ("TRL messages", lambda row: (row["messages"][:-1], row["messages"][-1]["content"])),
    "trl_prompt_only": ("TRL prompt-only", lambda row: (row["prompt"], None)),
    "trl_prompt_only_conversational": ("TRL prompt-only", lambda row: (row["prompt"], None)),
}


def _rows(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def _read(path, **reading):
    return read_rows(str(path), [path], Reading(needs_label="prompt_only" not in str(path), **reading))


def _without_nulls(message):
    return {key: value for key, value in message.items() if value is not None}


def _expected(rows, name):
    pairs = [CASES[name][1](row) for row in rows]
    texts = [[{"role": "user", "content": p}] if isinstance(p, str) else [*map(_without_nulls, p)] for p, _ in pairs]
    return [(messages, label) for messages, (_, label) in zip(texts, pairs, strict=True)]


def _found(found):
    assert not found.bad
    return [(list(row.messages), row.label) for row in found.rows]


@pytest.mark.parametrize("name", CASES)
def test_a_public_form_is_recognised_and_read(name, caplog):
    caplog.set_level("INFO")
    found = _read(FOLDER / f"{name}.jsonl")
    assert found.form.name == CASES[name][0]
    assert f"read as {CASES[name][0]}: " in caplog.text
    assert _found(found) == _expected(_rows(name), name)


# Labels of several types are no table's column.
@pytest.mark.parametrize("name", [name for name in CASES if name != "own"])
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_datasets_reads_the_same(name, kind, tmp_path):
    path = FOLDER / f"{name}.jsonl"
    if kind == "parquet":
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_rows(name)), path)
    loaded = datasets.load_dataset(kind, data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert _found(_read(path)) == _expected(list(loaded), name)


def test_every_form_has_a_file():
    assert {form for form, _ in CASES.values()} == {form.name for form in FORMS}


def test_other_columns_come_along_but_for_those_of_another_model():
    row = _read(FOLDER / "verl.jsonl").rows[0]
    assert row.columns["extra_info"]["question"] == "What is 2 + 3?"
    assert set(row.columns) == {"data_source", "ability", "reward_model", "extra_info"}
    assert set(_read(FOLDER / "gsm8k.jsonl").rows[0].columns) == {"answer"}
    assert "generations" not in _read(FOLDER / "openr1_math_220k.jsonl").rows[0].columns
    tools = [row.tools for row in _read(FOLDER / "trl_messages.jsonl").rows]
    assert tools[:2] == [None, None]
    assert tools[2][0]["function"]["name"] == "look_up"


def test_a_form_needs_half_of_the_first_rows():
    assert recognise([]) is None
    assert recognise([{"a": 1}]) is None
    verl, other = _rows("verl")[0], {"prompt": "a", "completion": "b"}
    assert recognise([verl, other]).name == "verl"
    assert recognise([verl, other, other]).name == "TRL prompt-completion"


# ---- broken in ten ways ----

PROMPTS = {"gsm8k": "question", "trl_messages": "messages"} | dict.fromkeys(
    ("openr1_math_220k", "numinamath_1_5", "numinamath_cot", "deepscaler_preview"), "problem"
)
LABELS = {
    "own": ("label",),
    "verl": ("reward_model", "ground_truth"),
    "dapo_math_17k": ("reward_model", "ground_truth"),
    "numinamath_cot": ("solution",),
    "trl_prompt_completion": ("completion",),
    "trl_prompt_completion_conversational": ("completion",),
} | dict.fromkeys(("gsm8k", "openr1_math_220k", "numinamath_1_5", "deepscaler_preview"), ("answer",))


def _set(row, path, value):
    for part in path[:-1]:
        row = row[part]
    row[path[-1]] = value


def _breakages(name):
    """Yield what is done to a row or its line, and what is said of it."""
    prompt, label = PROMPTS.get(name, "prompt"), LABELS.get(name)
    yield "no JSON", lambda row: '{"' + prompt, "not JSON"
    yield "no object", lambda row: "[1]", "a list, expected an object"
    yield "half a character", lambda row: json.dumps({**row, "note": "\ud83d"}), "holds half a character"
    yield "no UTF-8", lambda row: b'{"\xff": 1}', "not UTF-8"
    yield "no prompt", lambda row: row.pop(prompt) and row, f"'{prompt}' is missing"
    yield "an empty prompt", lambda row: row | {prompt: ""}, f"'{prompt}' is empty"
    yield "a number as prompt", lambda row: row | {prompt: 7}, f"'{prompt}' is a int, expected messages or text"
    yield "no message", lambda row: row | {prompt: [{"role": "user"}]}, "must hold messages with the texts"
    yield "no tool", lambda row: row | {"tools": "hammer"}, "'tools' is not JSON"
    yield "twice", None, "the same prompt as line 1"
    if name == "trl_messages":
        yield "no answer", lambda row: row | {prompt: row[prompt][:-1]}, "must end with a prompt and the assistant's"
    if label:
        key = ".".join(label)
        yield "no label", lambda row: _set(row, label, None) or row, f"'{key}' is missing"
        # What is a text in the form is not recognised as the form when it is none, and told by the line all the same.
        yield "an empty label", lambda row: _set(row, label, " ") or row, f"'{key}' "
        yield "NaN as label", lambda row: _set(row, label, float("nan")) or row, f"'{key}' "


BROKEN = [
    pytest.param(name, change, reason, id=f"{name}: {way}")
    for name in CASES
    for way, change, reason in _breakages(name)
]


@pytest.mark.parametrize(("name", "change", "reason"), BROKEN)
def test_a_broken_row_gives_one_message_with_line_and_remedy(name, change, reason, tmp_path):
    rows = _rows(name)
    # More right rows than the one that is broken, each with a prompt of its own.
    lines: list = [json.dumps(row) for row in rows]
    broken = change(copy.deepcopy(rows[1])) if change else rows[0]
    lines[1] = broken if isinstance(broken, str | bytes) else json.dumps(broken)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    found = _read(path)
    assert found.form.name == CASES[name][0]
    assert len(found.rows) == len(rows) - 1
    (bad,) = found.bad
    assert bad.place == "line 2"
    assert reason in bad.reason
    problem = describe_bad_rows(found)
    assert problem.value.startswith(f"1 of {len(rows)} lines are wrong:\n        line 2: ")
    assert problem.remedy.startswith("correct these lines")


def test_each_form_is_broken_in_ten_ways_or_more():
    assert min(sum(param.values[0] == name for param in BROKEN) for name in CASES) >= 10


# ---- labels in texts ----


@pytest.mark.parametrize(
    ("text", "label"),
    [("a #### 72", "72"), ("#### 1\n####-1,234,567 ", "-1234567"), ("#### 1,2", "1,2"), ("#### $5,000.50", "$5000.50")],
)
def test_the_answer_after_the_hashes(text, label):
    assert after_hashes(text) == label


@pytest.mark.parametrize("text", ["", "72", "#### ", "####"])
def test_no_answer_after_hashes(text):
    with pytest.raises(NoLabelError):
        after_hashes(text)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"$\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
    ],
)
def test_the_last_boxed_answer(text, label):
    assert last_boxed(text) == label


@pytest.mark.parametrize("text", ["", "2", r"\boxed", r"\boxed{", r"\boxed{\frac{1}{2}", r"\boxed{}", r"\boxed{ }"])
def test_no_boxed_answer(text):
    with pytest.raises(NoLabelError):
        last_boxed(text)


@pytest.mark.parametrize("answer", ["proof", "notfound", "Proof ", ""])
@pytest.mark.parametrize("name", ["numinamath_1_5", "deepscaler_preview"])
def test_answers_that_are_none_are_refused_or_dropped(answer, name, tmp_path):
    rows = _rows(name)
    rows[1]["answer"] = answer
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (bad,) = _read(path).bad
    assert bad.reason.startswith(f"'answer' is '{answer.strip()}', which no response can be compared with")
    assert "data.unlabeled=drop" in bad.remedy
    found = _read(path, unlabeled="drop")
    assert (len(found.rows), found.dropped, found.bad) == (2, {"without a label": 1}, [])


# ---- GSM8K as verl publishes its mapping ----


def _as_verl_maps(row):
    """Return prompt and label by examples/data_preprocess/gsm8k.py, see forms/README.md."""
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    found = re.search(r"#### (-?[0-9.,]+)", row["answer"])
    return f"{row['question']} {instruction}", found[1].replace(",", "")


def test_gsm8k_as_downloaded_gives_verls_prompts_and_labels():
    template = '{prompt} Let\'s think step by step and output the final answer after "####".'
    found = _read(FOLDER / "gsm8k.jsonl", prompt_template=template)
    ours = [(row.messages[0]["content"], row.label) for row in found.rows]
    assert ours == [_as_verl_maps(row) for row in _rows("gsm8k")]


def test_a_column_that_is_left_out_is_read_where_a_key_or_the_template_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_rows("openr1_math_220k")), path)
    rows = list(read_raw(path, {"generations"}))
    assert "generations" not in rows[0].content
    assert "problem" in rows[0].content
    assert [row.label for row in _read(path, label_key="generations[1]").rows] == ["cut"] * 3
    found = _read(path, prompt_template="{prompt} {generations[1]}")
    assert found.rows[2].messages[0]["content"] == "How many primes are below ten? cut"
    assert "generations" not in found.rows[2].columns
