from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from posttrain.cluster.driver import Ending, message_of, notify

LOG = """\
12:00:01 I posttrain.cli: begins
12:00:02 E posttrain.cluster.node: rank 3 has ended
12:00:03 W posttrain.cli: a warning
12:00:04 E posttrain.cli: train.py: 2 things are wrong:
  first: this
  remedy: that
12:00:05 I posttrain.cli: behind it
"""
CRASH = """\
12:00:01 I posttrain.cli: begins
12:00:02 C posttrain.report.logging: ended by KeyError
Traceback (most recent call last):
  File "x.py", line 1, in <module>
KeyError: 'y'
"""


def log_with(folder: Path, text: str) -> Path:
    path = folder / "step.log"
    path.write_text(text)
    return path


def test_the_last_error_of_a_log_is_the_message(tmp_path: Path) -> None:
    path = log_with(tmp_path, LOG)
    assert message_of(path) == f"train.py: 2 things are wrong:\n  first: this\n  remedy: that\n  log: {path}"


def test_a_role_before_the_level_is_no_hindrance(tmp_path: Path) -> None:
    path = log_with(tmp_path, "12:00:04 [trainer 0] E posttrain.cli: this\n")
    assert message_of(path) == f"this\n  log: {path}"


def test_of_a_crash_the_cause_alone_is_shown(tmp_path: Path) -> None:
    path = log_with(tmp_path, CRASH)
    said = message_of(path).splitlines()
    assert said[:2] == ["ended by KeyError", "  KeyError: 'y'"]
    assert said[-1] == f"  log: {path}"
    assert len(said) == 4


def test_who_was_killed_has_no_words(tmp_path: Path) -> None:
    path = log_with(tmp_path, "12:00:01 I posttrain.cli: half way\n")
    said = message_of(path)
    assert said.startswith("it was ended from outside")
    assert "the last line of its log: 12:00:01 I posttrain.cli: half way" in said
    assert message_of(log_with(tmp_path, "")).startswith("it was ended from outside")
    assert message_of(tmp_path / "none") == message_of(None) == "it left no log"


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    path = log_with(tmp_path, "12:00:00 E a.b: early\n" + "x" * (1 << 20) + "\n12:00:09 E a.b: late\n")
    assert message_of(path).startswith("late\n")
    path = log_with(tmp_path, "12:00:00 E a.b: early\n" + "x" * (1 << 20) + "\n")
    assert "early" not in message_of(path)


def record(text: str, **attributes: object) -> logging.LogRecord:
    made = logging.LogRecord("snakemake.logging", logging.ERROR, "x", 1, text, (), None)
    vars(made).update(attributes)
    return made


def test_what_says_nothing_to_a_user_is_left_out(tmp_path: Path) -> None:
    ending, path = Ending(), log_with(tmp_path, LOG)
    failure = record("", event=LogEvent.JOB_ERROR, rule_name="train", log=[str(path)], shellcmd="python --long {json}")
    assert ending.filter(failure)
    assert failure.shellcmd is None  # type: ignore[attr-defined]
    assert not ending.filter(record("CalledProcessError in ...", event=LogEvent.ERROR, exception="RuleException"))
    assert ending.filter(record("MissingInputException ...", event=LogEvent.ERROR, exception="MissingInputException"))
    assert not ending.filter(record("Cannot restore results/x: no backup found."))
    assert not ending.filter(record("Provided cores: 2"))
    assert ending.filter(record("Nothing to be done"))
    assert ending.words() == [f"train failed: {message_of(path)}"]


def test_who_asks_for_commands_sees_them(tmp_path: Path) -> None:
    ending = Ending(shows_commands=True)
    failure = record("", event=LogEvent.JOB_ERROR, rule_name="train", log=[], shellcmd="python")
    assert ending.filter(failure)
    assert failure.shellcmd == "python"  # type: ignore[attr-defined]
    assert ending.filter(record("CalledProcessError in ...", event=LogEvent.ERROR, exception="RuleException"))
    assert ending.words() == ["train failed: it left no log"]


def test_last_words_are_asked_for_at_the_end_and_empty_ones_not_said() -> None:
    ending, said = Ending(), ["now"]
    ending.add(lambda: said[0])
    ending.add(lambda: "")
    said[0] = "later"
    assert ending.words() == ["later"]


SPEAKER = """
import logging, sys
from posttrain.cluster.driver import Ending
ending = Ending()
ending.watch(logging.getLogger("x"))
ending.add(lambda: sys.argv[1])
print("last of the others", file=sys.stderr)
"""


@pytest.mark.parametrize(("words", "expected"), [("[red] is no markup", "[red] is no markup"), ("", "")])
def test_it_speaks_when_the_process_ends(words: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKER, words], capture_output=True, text=True, check=True)
    before, _, after = done.stderr.partition("last of the others\n")
    assert before == ""
    assert after.strip() == expected


TELLER = 'printf "%s|%s|%s" "$POSTTRAIN_STATE" "$POSTTRAIN_RUN" "$POSTTRAIN_MESSAGE" > "$1"'


def test_a_site_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told"
    notify(["/bin/sh", "-c", TELLER, "sh", str(told)], Path("results/mine"), "failed", "a; $(b)\nc")
    assert told.read_text() == f"failed|{tmp_path}/results/mine|a; $(b)\nc"


def test_a_command_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    notify([], tmp_path, "ended", "")
    assert caplog.records == []
    notify(["/nowhere/tell"], tmp_path, "ended", "")
    notify(["/bin/sh", "-c", "exit 3"], tmp_path, "ended", "")
    assert ["No such file" in caplog.messages[0], caplog.messages[1]] == [True, "site.end_command ended with 3"]
