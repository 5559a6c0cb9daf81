"""`posttrain`, the one program for what only looks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.begun_runs import begin_run
from tests.support.rejections import assert_rejected

from posttrain.__main__ import COMMANDS

# Of work, not of waiting, so that others on this machine do not count; it takes about 1.5 of them.
PLAN_CPU_SECONDS = 4.0


def posttrain(folder: Path, *words: str, code: int = 0) -> str:
    """Run the installed program in a folder; return what it prints, errors included."""
    done = subprocess.run(
        [Path(sys.executable).with_name("posttrain"), *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_help_tells_of_every_command_and_setting(tmp_path: Path) -> None:
    shown = posttrain(tmp_path, "--help")
    for name in COMMANDS:
        assert f"\n    {name}" in shown
    for page in (shown, posttrain(tmp_path, "plan", "--help")):
        assert "model= nodes= hardware= site= recipe=" in page
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["plna"], "invalid choice: 'plna'"), ([], "required: COMMAND"), (["gc", "--dlete"], "arguments: --dlete")],
)
def test_what_is_no_command_is_refused(words: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in posttrain(tmp_path, *words, code=2)


def test_a_wrong_setting_is_told_as_snakemake_tells_it(tmp_path: Path) -> None:
    told = posttrain(tmp_path, "status", "model=tyni", "set=optmizer.lr=1", code=1)
    assert_rejected(told, "unknown-name", "'tiny'", key="model")
    assert_rejected(told, "unknown-key", "'optimizer.lr'", key="optmizer.lr")


def test_files_lie_where_it_is_called_and_runs_where_it_is_told(tmp_path: Path) -> None:
    """Options may stand anywhere; `--config` and a rule's name are understood, too."""
    begin_run(tmp_path / "work" / "results", "old")
    (tmp_path / "mine.yaml").write_text("run: old\n")
    for words in (
        ["status", "--configfile", "mine.yaml", "-d", "work", "model=tiny"],
        ["status", "model=tiny", "--directory", "work", "site=local", "--configfile", "mine.yaml"],
        ["status", "-d", "work", "--config", "model=tiny", "run=old"],
    ):
        assert "6 of 40" in posttrain(tmp_path, *words)
    assert_rejected(posttrain(tmp_path, "verify_store", code=1), "receipt-mismatch")


def test_who_only_looks_need_not_say_what_a_run_learns(tmp_path: Path) -> None:
    begin_run(tmp_path / "results", "old")
    assert "6 of 40" in posttrain(tmp_path, "status", "run=old")
    for command in ("plan", "check", "verify"):
        assert "training.num_steps = 80" in posttrain(tmp_path, command, "run=old", code=1)
    assert "training.num_steps" in posttrain(
        tmp_path, "plan", "run=new", "fork=old@4", "set=training.num_steps=4", code=1
    )
    assert not (tmp_path / "results" / "plans").exists()


def test_what_does_not_fit_is_not_worth_a_check(tmp_path: Path) -> None:
    told = posttrain(tmp_path, "check", "set=hardware.memory_gib_per_gpu=0.1", code=1)
    assert "  - parallel = " in told
    assert told.rstrip().endswith("`snakemake plan` with the same --config draws all figures.")


def test_a_plan_is_fast_and_runs_no_snakemake(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    posttrain(tmp_path, "plan", "model=glm5", "nodes=16")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < PLAN_CPU_SECONDS
    assert sorted(os.listdir(tmp_path)) == ["results"]
    code = "import sys; sys.argv[1:] = ['plan']; from posttrain.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in rows}
    assert "omegaconf" in packages
    assert not packages & {"snakemake", "torch", "transformers", "megatron", "huggingface_hub", "wandb", "aiohttp"}
