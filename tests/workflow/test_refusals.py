"""What this version cannot run: a dry run shows all and ends with it, a run starts nothing."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
from tests.support.forked_snakemake import forked_snakemake
from tests.support.workflow_runs import run_snakemake

REFUSAL = "this version cannot run what is asked for:"
RED = "\x1b[31m"
CANNOT = {
    "several nodes": (
        "model=glm5",
        "nearest that it can train: site=NAME, of a site with launcher slurm or kubernetes",
    ),
    "no commit": ("model=glm5_4layer", "nearest that it can train: set='model.source.revision=COMMIT'"),
}


def dry_run(folder: Path, *words: str, **environment: str) -> str:
    code, output = forked_snakemake(folder, "-n", *words, environment=environment)
    assert code == 0, output
    return output


@pytest.mark.parametrize("name", CANNOT)
def test_a_dry_run_shows_everything_and_ends_in_red(name: str, tmp_path: Path) -> None:
    model, nearest = CANNOT[name]
    output = dry_run(tmp_path, "--config", model, FORCE_COLOR="1")
    assert " with grpo: " in output, "the jobs are shown all the same"
    plan, _, words = output.partition(REFUSAL)
    assert plan.endswith(RED + "\n\n") or plan.rstrip("\n").endswith(RED), repr(plan[-40:])
    assert nearest in words
    assert words.rstrip().removesuffix("\x1b[0m").endswith("`snakemake plan` with the same --config draws all figures.")


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "model=tiny"],
        ["finalize_torch_dist", "--config", "model=deepseek_v3.2"],
        ["finalize_rollout_fp8", "--config", "model=glm5"],
        ["plan", "--config", "model=glm5"],
        ["status", "--config", "model=glm5"],
    ],
    ids=" ".join,
)
def test_what_runs_is_not_refused(words: list[str], tmp_path: Path) -> None:
    assert REFUSAL not in dry_run(tmp_path, *words)


def test_an_evaluation_over_several_nodes_shows_their_number(tmp_path: Path) -> None:
    """Dry run and refusal show one number; one machine is too few, and the export does not need it."""
    trainable = "set=engine.pd.num_prefill_engines=0 engine.num_engines=2"
    config = ["--config", "model=glm5", "site=example_slurm"]
    assert REFUSAL not in dry_run(tmp_path, *config, trainable), "in FP8 one node holds it"
    config.append(f"{trainable} evaluation.precision=source")
    output = dry_run(tmp_path, *config)
    assert re.findall(r"held-out prompts, (\w+) training \((.*?)\)", output) == [
        ("before", "2 nodes, 16 GPUs, about 80 min"),
        ("after", "2 nodes, 16 GPUs, about 80 min"),
    ]
    assert REFUSAL not in output
    alone = ["--config", "model=glm5", "site=local", "set=evaluation.precision=source"]
    _, _, words = dry_run(tmp_path, *alone).partition(REFUSAL)
    assert re.findall(r"^  - (evaluate.*)$", words, re.MULTILINE) == [
        "evaluate = 2 nodes of 8 h200 hold the model [one-machine]"
    ]
    assert "finalize_export_hf" in words
    assert "evaluate =" not in dry_run(tmp_path, "finalize_export_hf", *alone)


@pytest.mark.parametrize("cores", ["1", "2", "all"])
def test_a_run_ends_before_anything_is_fetched(cores: str, tmp_path: Path) -> None:
    """The Hub listens, so that an attempt to reach it would be seen; nothing is written, and nobody waits."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0.1)
        began = time.monotonic()
        code, output = forked_snakemake(
            tmp_path, "--cores", cores, "--config", "model=deepseek_v3.2",
            environment={"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"},
        )  # fmt: skip
        seconds = time.monotonic() - began
        with pytest.raises(TimeoutError):
            hub.accept()
    assert code == 1
    assert seconds < 30
    assert not re.search(r"^Job \d", output, re.MULTILINE)
    assert output.rstrip().endswith("`snakemake plan` with the same --config draws all figures.")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".snakemake", "logs"]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["configs"], "what was resolved"


def test_a_target_that_lacks_nothing_runs_where_training_is_refused(tmp_path: Path) -> None:
    ended = run_snakemake(tmp_path, "plan", "--cores", "1", "--config", "model=deepseek_v3.2")
    assert ended.returncode == 0, ended.stdout
    assert "plan: " in ended.stdout
