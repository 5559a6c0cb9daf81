import gzip
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from tests.support.rejections import rejected

from posttrain.errors import ConfigError
from posttrain.rl.data.messages import PromptTemplate
from posttrain.rl.data.raw_rows import BATCH_ROWS, files_of
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import Row, describe_bad_rows, read_rows


def _write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def _message(text):
    return [{"role": "user", "content": text}]


def _read(path, **reading):
    return read_rows(str(path), [path], Reading(**reading))


def _reasons(found):
    return {row.place: row.reason for row in found.bad}


def test_messages_and_text_become_prompts(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"question": "1+1", "answer": "2"}, {"question": _message("2+2"), "answer": "4", "more": 1}]
    path = _write(tmp_path / "train.jsonl", rows)
    found = _read(path, prompt_key="question", label_key="answer")
    assert found.rows == [
        Row(({"role": "user", "content": "1+1"},), "2", {"answer": "2"}, is_text=True),
        Row(({"role": "user", "content": "2+2"},), "4", {"answer": "4", "more": 1}),
    ]
    assert f"{path}: read as columns 'question' and 'answer': 2 prompts, 0 wrong lines" in caplog.text


def test_one_report_lists_every_bad_line(tmp_path):
    lines = [
        {"prompt": _message("a"), "label": "1"},
        '{"prompt": ',
        {"prompt": _message("b")},
        {"prompt": "", "label": "1"},
        {"label": "1"},
        '["no", "object"]',
        "",
        {"prompt": _message("c"), "label": 7},
        {"prompt": [{"role": "user"}], "label": " "},
        {"prompt": 3, "label": "1"},
        {"prompt": _message("a"), "label": "2"},
        {"prompt": [], "label": None},
        {"prompt": [{"role": "user", "content": "d"}, "text"], "label": "1"},
        {"prompt": "a", "label": "1"},
        {"prompt": _message("e"), "label": "1"},
        '{"prompt": "f", "label": NaN}',
    ]
    path = _write(tmp_path / "train.jsonl", lines)
    problem = describe_bad_rows(_read(path))
    assert problem.key == str(path)
    reported = dict(line.strip().removeprefix("line ").split(": ", 1) for line in problem.value.splitlines()[1:])
    assert problem.value.startswith("12 of 15 lines are wrong:")
    assert reported.pop("2").startswith("not JSON (")
    assert reported == {
        "3": "'label' is missing",
        "4": "'prompt' is empty",
        "5": "'prompt' is missing",
        "6": "a list, expected an object",
        "9": "'prompt' must hold messages with the texts 'role' and 'content': message 1 (user) has no text as "
        "'content'; 'label' is empty",
        "10": "'prompt' is a int, expected messages or text",
        "11": "the same prompt as line 1",
        "12": "'prompt' is empty; 'label' is missing",
        "13": "'prompt' must hold messages with the texts 'role' and 'content': message 2 is a str, expected an object",
        "14": "the same prompt as line 1",
        "16": "'label' is nan",
    }
    assert problem.remedy == (
        "correct these lines, or set data.duplicates=drop or keep, or set data.unlabeled=drop to leave them out, "
        "or set data.prompt_key and data.label_key"
    )


def test_a_long_report_is_cut_and_counted(tmp_path):
    problem = describe_bad_rows(_read(_write(tmp_path / "train.jsonl", ["no json"] * 70)))
    lines = problem.value.splitlines()
    assert lines[0] == "70 of 70 lines are wrong:"
    assert len(lines) == 52
    assert lines[50].strip().startswith("line 50: not JSON")
    assert lines[51].strip() == "and 20 more"


def test_an_empty_or_absent_or_binary_file(tmp_path):
    assert describe_bad_rows(_read(_write(tmp_path / "empty.jsonl", [""]))).value == "no prompts"
    with rejected("data-unreadable", "No such file"):
        _read(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "a", "label": "1"}\n\xff\xfe\x00\n')
    assert _reasons(_read(tmp_path / "binary.jsonl")) == {"line 2": "not UTF-8 (invalid start byte at byte 0)"}


def test_lines_that_no_other_program_could_write_are_named(tmp_path):
    half = ['{"prompt": "a \\ud83d", "label": "1"}', '{"prompt": "b", "label": "\\udc80"}', '{"\\ud800": 1}']
    lines = [*half, '{"prompt": ' * 100_000, '{"prompt": "\\ud83d\\ude00", "label": "1"}']
    assert _reasons(_read(_write(tmp_path / "train.jsonl", lines))) == {
        "line 1": r"not JSON (holds half a character, \ud83d)",
        "line 2": r"not JSON (holds half a character, \udc80)",
        "line 3": r"not JSON (holds half a character, \ud800)",
        "line 4": "not JSON (nested too deeply)",
    }


# ---- kinds of files ----

ROWS = [{"prompt": f"{i}+1", "label": str(i + 1), "level": i % 3} for i in range(BATCH_ROWS + 3)]


def _parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    _parquet(tmp_path / "a.parquet", ROWS)
    expected = [
        Row(tuple(_message(row["prompt"])), row["label"], {"level": row["level"]}, is_text=True) for row in ROWS
    ]
    for name in ("a.jsonl", "a.json", "lines.json", "a.jsonl.gz", "a.parquet"):
        assert _read(tmp_path / name).rows == expected, name


def test_labels_of_every_type_in_one_file(tmp_path):
    labels = ["a", 3, 2.5, True, False, 0, ["a", 1], {"b": None}, [], {}]
    rows = [{"prompt": f"p{i}", "label": label} for i, label in enumerate(labels)]
    assert [row.label for row in _read(_write(tmp_path / "a.jsonl", rows)).rows] == labels


def test_parts_of_one_file_are_read_in_order_and_told_by_name(tmp_path):
    _parquet(tmp_path / "train-1.parquet", ROWS[4:5] + ROWS[:1])
    _parquet(tmp_path / "train-0.parquet", ROWS[:3])
    _write(tmp_path / "test.jsonl", ROWS[:2])
    paths = files_of(str(tmp_path / "train-*.parquet"))
    found = read_rows("parts", paths, Reading())
    assert [row.label for row in found.rows] == ["1", "2", "3", "5"]
    assert _reasons(found) == {"train-1.parquet, row 2": "the same prompt as train-0.parquet, row 1"}
    assert [path.name for path in files_of(str(tmp_path))] == ["test.jsonl", "train-0.parquet", "train-1.parquet"]
    assert files_of(str(tmp_path / "none-*")) == []
    assert files_of(str(tmp_path / "absent.jsonl")) == [tmp_path / "absent.jsonl"]


def test_files_that_are_not_what_they_are_called(tmp_path):
    for name, content in {"a.parquet": b"PAR1", "b.parquet": b"", "c.jsonl.gz": b"\x1f\x8b\x08", "d.gz": b"a"}.items():
        (tmp_path / name).write_bytes(content)
        with rejected("data-unreadable", key="data"):
            _read(tmp_path / name)
    (tmp_path / "e.json").write_text('[{"prompt": "a",\n "label": }]')
    assert list(_reasons(_read(tmp_path / "e.json"))) == ["line 2"]
    (tmp_path / "f.json").write_text('[{"prompt": "a", "label": "1"}, {"prompt": "\\ud83d", "label": "1"}, 3]')
    assert _reasons(_read(tmp_path / "f.json")) == {
        "row 2": r"not JSON (holds half a character, \ud83d)",
        "row 3": "a int, expected an object",
    }
    (tmp_path / "g.json").write_text("[" * 100_000)
    assert _reasons(_read(tmp_path / "g.json")) == {"line 1": "not JSON (nested too deeply)"}


def test_parquet_values_that_json_lacks(tmp_path):
    rows = [{"prompt": "a", "label": "1", "image": b"png"}, {"prompt": "b", "label": "2", "image": None}]
    assert _reasons(_read(_parquet(tmp_path / "a.parquet", rows))) == {
        "row 1": "'image' holds a bytes that no model would be shown"
    }


@pytest.mark.parametrize("value", ["cat.png", ["a.png"], {"url": "https://a/cat.png"}])
def test_a_column_of_images_is_rejected_however_it_is_written(tmp_path, value):
    lines = [{"prompt": "What is it?", "label": "1", "image": value}, {"prompt": "b", "label": "2", "image": None}]
    (reason,) = _reasons(_read(_write(tmp_path / "a.jsonl", lines))).values()
    assert re.match(r"'image' holds a (str|list|dict) that no model would be shown", reason)


# ---- choices ----


@pytest.mark.parametrize(("duplicates", "labels"), [("keep", ["1", "2", "3", "4"]), ("drop", ["1", "3", "4"])])
def test_repeated_prompts_by_choice(tmp_path, duplicates, labels, caplog):
    caplog.set_level("INFO")
    tools = [{"name": "add"}]
    rows = [("a", "1", None), (_message("a"), "2", None), ("b", "3", None), ("a", "4", tools)]
    lines = [{"prompt": prompt, "label": label, "tools": tools} for prompt, label, tools in rows]
    found = _read(_write(tmp_path / "a.jsonl", lines), duplicates=duplicates)
    assert [row.label for row in found.rows] == labels
    assert found.rows[-1].tools == tools
    assert ("1 repeated left out" in caplog.text) == (duplicates == "drop")


def test_rows_without_a_label_by_choice(tmp_path):
    lines = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": ""}, {"prompt": "c"}, {"prompt": "", "label": ""}]
    path = _write(tmp_path / "a.jsonl", lines)
    assert list(_reasons(_read(path))) == ["line 2", "line 3", "line 4"]
    found = _read(path, unlabeled="drop")
    assert (len(found.rows), found.dropped, list(_reasons(found))) == (1, {"without a label": 2}, ["line 4"])
    nothing = _read(_write(tmp_path / "b.jsonl", lines[1:2]), unlabeled="drop")
    assert not nothing.is_right
    assert describe_bad_rows(nothing).value == "no prompts, 1 without a label left out"


def test_system_prompt_and_template(tmp_path, caplog):
    caplog.set_level("INFO")
    own = [{"role": "system", "content": "old"}, *_message("{level}")]
    lines = [
        {"prompt": "a", "label": "1", "level": 1},
        {"prompt": own, "label": "2", "level": 2},
        {"prompt": "b", "label": "3"},
    ]
    path = _write(tmp_path / "a.jsonl", lines)
    found = _read(path, system_prompt="new", prompt_template="{level}: {prompt}")
    assert [[message["content"] for message in row.messages] for row in found.rows] == [
        ["new", "1: a"],
        ["new", "2: {level}"],
    ]
    assert _reasons(found) == {"line 3": "'level' is missing (did you mean label?)"}
    assert "data.system_prompt replaces 1 system messages" in caplog.text


def test_keys_beside_a_form(tmp_path):
    """A key that is given is taken; the other is the form's."""
    lines = [{"question": "1+1", "answer": "so #### 2", "extra": {"hint": "two"}}]
    path = _write(tmp_path / "a.jsonl", lines)
    assert _read(path).rows[0].label == "2"
    assert _read(path, label_key="extra.hint").rows[0].label == "two"
    found = _read(path, prompt_key="extra.hint")
    assert (found.rows[0].messages[0]["content"], found.rows[0].label) == ("two", "2")
    assert found.form.name == "columns 'extra.hint' and 'answer'"


def test_the_projects_own_columns_are_taken_first(tmp_path):
    lines = [{"prompt": "a", "label": "l", "question": "q", "answer": "#### 2", "messages": [], "completion": "c"}]
    found = _read(_write(tmp_path / "a.jsonl", lines))
    assert (found.rows[0].messages[0]["content"], found.rows[0].label) == ("a", "l")
    half = [{"question": "q", "answer": "#### 2", "label": 3}]
    assert _read(_write(tmp_path / "b.jsonl", half)).rows[0].label == 3


def test_a_file_of_no_known_form(tmp_path):
    path = _write(tmp_path / "a.jsonl", [{"text": "a", "id": 1}])
    with pytest.raises(ConfigError) as raised:
        _read(path)
    (problem,) = raised.value.problems
    assert (problem.key, problem.value) == (str(path), "columns text, id")
    assert "GSM8K" in problem.allowed
    assert problem.remedy == "set data.prompt_key and data.label_key"
    with rejected("label-missing", "TRL prompt-only"):
        _read(_write(tmp_path / "b.jsonl", [{"prompt": "a"}]))
    assert _read(tmp_path / "b.jsonl", needs_label=False).rows == [Row(tuple(_message("a")), None, is_text=True)]


def test_a_wrong_template_or_key_is_told_before_the_rows(tmp_path):
    path = _write(tmp_path / "a.jsonl", [{"prompt": "a", "label": "1"}])
    for reading, code, key in (
        ({"prompt_template": "a"}, "placeholder-missing", "data.prompt_template"),
        ({"label_key": "a["}, "not-a-path-of-keys", "data.label_key"),
    ):
        with rejected(code, key=key):
            _read(path, **reading)
    assert PromptTemplate("{prompt}").columns == set()


def test_a_response_to_learn_stands_in_a_column_of_its_own(tmp_path):
    answer = [{"role": "assistant", "content": "2, of course"}]
    rows = [
        {"prompt": "1+1", "label": "2", "why": "because"},
        {"prompt": "1+2", "label": "3", "why": answer},
        {"prompt": "1+3", "label": "4"},
        {"prompt": "1+4", "label": "5", "why": 5},
        {"prompt": "1+5", "label": "6", "why": [*answer, *answer]},
        {"prompt": "1+6", "label": "7", "why": [{"role": "user", "content": "no"}]},
    ]
    found = _read(_write(tmp_path / "train.jsonl", rows), response_key="why")
    assert [row.columns["why"] for row in found.rows] == ["because", answer]
    assert list(_reasons(found)) == ["line 3", "line 4", "line 5", "line 6"]
    assert "expected a text or one message of the assistant" in _reasons(found)["line 4"]


def test_a_response_is_kept_where_rewards_do_not_read_it(tmp_path):
    row = {"problem": "1+1", "solution": "so 2", "answer": "2", "generations": ["<think>a</think>2"]}
    path = _write(tmp_path / "train.jsonl", [row])
    assert "generations" not in _read(path).rows[0].columns
    assert _read(path, response_key="generations[0]").rows[0].columns["generations"] == ["<think>a</think>2"]


# ---- answers in prompts ----

DIALOGUE = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("role", ["assistant", "model", "gpt"])
@pytest.mark.parametrize("key", ["conversation", "prompt"])
def test_a_prompt_that_ends_with_an_answer_is_rejected_whatever_its_key(tmp_path, key, role):
    """A model would be asked to answer once more what it has been shown the answer of."""
    row = {key: [*DIALOGUE[:1], {"role": role, "content": "2"}], "label": "2"}
    path = _write(tmp_path / "a.jsonl", [row])
    problem = describe_bad_rows(_read(path, prompt_key=key))
    assert f"line 1: '{key}' ends with a message of the {role}, which a prompt may not" in problem.value
    assert f"set data.prompt_key={key}[:-1] and data.label_key={key}[-1].content" in problem.remedy
    assert _read(path, prompt_key=key, needs_label=False).bad == [], "a conversation of a calibration pass"
    followed = _read(path, prompt_key=f"{key}[:-1]", label_key=f"{key}[-1].content")
    assert followed.rows == [Row(tuple(DIALOGUE[:1]), "2", {key: row[key]})]


def test_the_remedy_for_a_column_of_dialogues_is_one_that_works(tmp_path):
    path = _write(tmp_path / "a.jsonl", [{"conversation": DIALOGUE, "id": 1}])
    with pytest.raises(ConfigError) as raised:
        _read(path)
    assert raised.value.problems[0].remedy == (
        "set data.prompt_key=conversation[:-1] and data.label_key=conversation[-1].content"
    )
    unanswered = _write(tmp_path / "b.jsonl", [{"conversation": DIALOGUE[:1]}, {"conversation": DIALOGUE}])
    with rejected("unknown-columns") as raised:
        _read(unanswered)
    assert raised.value.problems[0].remedy == "set data.prompt_key and data.label_key"


def test_two_answers_at_the_end_of_a_dialogue(tmp_path):
    path = _write(tmp_path / "a.jsonl", [{"messages": [*DIALOGUE, DIALOGUE[1]]}])
    assert _reasons(_read(path)) == {
        "line 1": "'messages' ends with a message of the assistant before the last one, which a prompt may not"
    }
    cut = _read(path, prompt_key="messages[:-1]", label_key="messages[-1].content")
    assert [row.remedy for row in cut.bad] == [""]
    assert "before the last one" in cut.bad[0].reason


def test_the_message_of_an_answer_is_kept_where_it_has_more_than_text(tmp_path):
    """Rewards compare with the text; fine-tuning learns the reasoning, too."""
    thinking = {"role": "assistant", "reasoning_content": "one more", "content": "2"}
    forms = [
        {"messages": [*DIALOGUE[:1], thinking]},
        {"prompt": DIALOGUE[:1], "completion": [thinking]},
    ]
    for number, row in enumerate(forms):
        (read,) = _read(_write(tmp_path / f"{number}.jsonl", [row])).rows
        assert (read.messages, read.label, read.answer) == (tuple(DIALOGUE[:1]), "2", thinking)
    (plain,) = _read(_write(tmp_path / "plain.jsonl", [{"messages": DIALOGUE}])).rows
    assert (plain.label, plain.answer) == ("2", None)
    path = _write(tmp_path / "own.jsonl", [{"turns": [*DIALOGUE[:1], thinking]}])
    (own,) = _read(path, prompt_key="turns[:-1]", label_key="turns[-1]").rows
    assert (own.label, own.answer) == ("2", thinking)
    (own,) = _read(path, prompt_key="turns[:-1]", label_key="turns[-1].content", response_key="turns[-1]").rows
    assert (own.label, own.columns["turns"][-1]) == ("2", thinking)


def test_only_the_first_rows_are_read_when_asked(tmp_path, caplog):
    caplog.set_level("INFO")
    path = _write(tmp_path / "a.jsonl", [*({"prompt": f"a{i}", "label": "1"} for i in range(5)), "no json"])
    found = read_rows("a", [path], Reading(), most=5)
    assert (len(found.rows), found.bad) == (5, [])
    assert "prompts" not in caplog.text


def test_variables_of_the_template_by_row_are_rejected_by_name(tmp_path):
    """TRL renders each row with its own."""
    rows = [
        {"prompt": f"a{i}", "label": "1", "chat_template_kwargs": given} for i, given in enumerate(({"a": 1}, {}, None))
    ]
    (bad,) = _read(_write(tmp_path / "a.jsonl", rows)).bad
    assert (bad.place, bad.remedy) == ("line 1", "remove it, and set data.chat_template_kwargs")
