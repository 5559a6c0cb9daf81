import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.dataset import PromptOrder, load_prompts
from posttrain.errors import ConfigError
from posttrain.types import Prompt


def _write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def _message(text):
    return [{"role": "user", "content": text}]


def test_messages_and_text_become_prompts(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"question": "1+1", "answer": "2"}, {"question": _message("2+2"), "answer": "4", "more": 1}]
    path = _write(tmp_path / "train.jsonl", rows)
    assert load_prompts(path, "question", "answer") == [
        Prompt(0, ({"role": "user", "content": "1+1"},), "2"),
        Prompt(1, ({"role": "user", "content": "2+2"},), "4"),
    ]
    assert f"{path}: 2 prompts" in caplog.text


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
    ]
    with pytest.raises(ConfigError) as raised:
        load_prompts(_write(tmp_path / "train.jsonl", lines), "prompt", "label")
    (problem,) = raised.value.problems
    assert problem.key == str(tmp_path / "train.jsonl")
    reported = dict(line.strip().removeprefix("line ").split(": ", 1) for line in problem.value.splitlines()[1:])
    assert problem.value.startswith("12 of 14 lines are wrong:")
    assert reported.pop("2").startswith("not JSON (")
    assert reported == {
        "3": "'label' is missing",
        "4": "'prompt' is empty",
        "5": "'prompt' is missing",
        "6": "a list, expected an object",
        "8": "'label' is a int, expected text",
        "9": "'prompt' must hold messages with the texts 'role' and 'content'; 'label' is empty",
        "10": "'prompt' is a int, expected messages or text",
        "11": "the same prompt as line 1",
        "12": "'prompt' is empty; 'label' is missing",
        "13": "'prompt' must hold messages with the texts 'role' and 'content'",
        "14": "the same prompt as line 1",
    }


def test_a_long_report_is_cut_and_counted(tmp_path):
    path = _write(tmp_path / "train.jsonl", ["no json"] * 70)
    with pytest.raises(ConfigError) as raised:
        load_prompts(path, "prompt", "label")
    lines = raised.value.problems[0].value.splitlines()
    assert lines[0] == "70 of 70 lines are wrong:"
    assert len(lines) == 52
    assert lines[50].strip().startswith("line 50: not JSON")
    assert lines[51].strip() == "and 20 more"


def test_an_empty_or_absent_or_binary_file(tmp_path):
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(_write(tmp_path / "empty.jsonl", [""]), "prompt", "label")
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(tmp_path / "absent.jsonl", "prompt", "label")
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "a", "label": "1"}\n\xff\xfe\x00\n')
    with pytest.raises(ConfigError, match=r"1 of 2 lines are wrong:\n        line 2: not UTF-8"):
        load_prompts(tmp_path / "binary.jsonl", "prompt", "label")


def test_lines_that_no_other_program_could_write_are_named(tmp_path):
    half = ['{"prompt": "a \\ud83d", "label": "1"}', '{"prompt": "b", "label": "\\udc80"}', '{"\\ud800": 1}']
    lines = [*half, '{"prompt": ' * 100_000, '{"prompt": "\\ud83d\\ude00", "label": "1"}']
    with pytest.raises(ConfigError) as raised:
        load_prompts(_write(tmp_path / "train.jsonl", lines), "prompt", "label")
    assert [line.strip() for line in raised.value.problems[0].value.splitlines()] == [
        "4 of 5 lines are wrong:",
        r"line 1: not JSON (holds half a character, \ud83d)",
        r"line 2: not JSON (holds half a character, \udc80)",
        r"line 3: not JSON (holds half a character, \ud800)",
        "line 4: not JSON (nested too deeply)",
    ]


# ---- the order ----


def test_known_orders():
    """Written down once: another order would silently change every resumed run."""
    assert PromptOrder(5, 7).take(0, 12) == [1, 3, 4, 0, 2, 3, 2, 4, 0, 1, 1, 4]
    assert PromptOrder(5, 8).take(0, 5) == [2, 0, 1, 4, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 100), min_size=1, max_size=6),
    st.integers(0, 500),
)
def test_any_cut_into_steps_gives_the_same_prompts(num_prompts, seed, steps, start):
    whole = PromptOrder(num_prompts, seed).take(start, sum(steps))
    order, taken, cursor = PromptOrder(num_prompts, seed), [], start
    for count in steps:
        taken += order.take(cursor, count)
        cursor += count
    assert taken == whole
    backwards = PromptOrder(num_prompts, seed)
    backwards.take(10_000, 3)
    assert backwards.take(start, sum(steps)) == whole


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 100])
def test_each_epoch_takes_each_prompt_once_also_when_a_step_is_larger(num_prompts):
    taken = PromptOrder(num_prompts, 1).take(0, 7 * num_prompts)
    for epoch in range(7):
        assert sorted(taken[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))
    assert Counter(taken) == dict.fromkeys(range(num_prompts), 7)


def test_epochs_and_seeds_differ():
    epochs = [tuple(PromptOrder(50, seed).take(epoch * 50, 50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(epochs)) == 4


def test_the_global_random_state_is_neither_read_nor_changed():
    random.seed(1)
    first, state = PromptOrder(20, 3).take(0, 20), random.getstate()
    random.seed(2)
    assert PromptOrder(20, 3).take(0, 20) == first
    random.seed(1)
    assert random.getstate() == state


def test_no_prompts_are_no_order():
    with pytest.raises(AssertionError):
        PromptOrder(0, 1)
    assert PromptOrder(3, 1).take(5, 0) == []
