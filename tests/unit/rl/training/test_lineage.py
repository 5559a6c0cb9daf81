"""Forks of a run that is only files: what is linked, what is told, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from tests.support.begun_runs import WEIGHTS, begin_run, paths_of
from tests.support.rejections import rejected

from posttrain.config.load import dump_resolved, dump_yaml
from posttrain.errors import ConfigError
from posttrain.report.sinks import read_rows
from posttrain.rl.training.checkpoints import CheckpointFolder, committed_checkpoints
from posttrain.rl.training.fork import begin_fork
from posttrain.rl.training.lineage import check_fork, read_lineage
from posttrain.store import Paths, read_receipt, write_json, write_receipt, write_text
from posttrain.store.lease import Lease, LeaseHeldError


@pytest.fixture
def old(tmp_path: Path) -> Paths:
    """A run with six steps' metrics and checkpoints after steps 2 and 4."""
    return begin_run(tmp_path / "results", "old")


def fork_of(old: Paths, fork: str = "old@2", overrides: str = "", **workflow) -> Paths:
    return paths_of(old.run.parent, overrides, **{"run": "new", "fork": fork, **workflow})


def refusals(paths: Paths) -> list[tuple[str, str, str]]:
    return [(problem.key, problem.value, problem.allowed) for problem in check_fork(paths)]


def test_a_fork_has_the_checkpoint_by_links_and_the_metrics_behind_it(old: Paths, caplog) -> None:
    new = fork_of(old)
    begin_fork(new)
    assert "copied" not in caplog.text
    (committed,) = committed_checkpoints(new.checkpoints)
    assert committed == (2, new.checkpoints / "step_000002")
    theirs = {path.name: path for path in (old.checkpoints / "step_000002").iterdir()}
    assert {path.name for path in committed[1].iterdir()} == theirs.keys()
    assert all(path.samefile(theirs[path.name]) for path in committed[1].iterdir())
    CheckpointFolder(new.checkpoints, keep=1).check_content(2)
    assert [row["step"] for row in read_rows(new.metrics)] == [1, 2]


def test_where_links_are_not_possible_files_are_copied(old: Paths, monkeypatch, caplog) -> None:
    monkeypatch.setattr("posttrain.rl.training.fork.hard_link", lambda source, target: False)
    new = fork_of(old)
    begin_fork(new)
    CheckpointFolder(new.checkpoints, keep=1).check_content(2)
    theirs, ours = (paths.checkpoints / "step_000002" / "__1_0.distcp" for paths in (old, new))
    assert not ours.samefile(theirs)
    assert "bytes were copied" in caplog.text


def test_the_receipt_tells_the_lineage_of_forks_of_forks(old: Paths) -> None:
    new = fork_of(old, overrides="optimizer.lr=1e-5")
    write_text(new.experiment, dump_yaml(new.resolved.experiment))
    write_text(new.config, dump_resolved(new.resolved))
    write_receipt(new.fork_receipt, begin_fork(new))
    receipt = read_receipt(new.fork_receipt)
    assert dict(receipt.inputs) == WEIGHTS
    first = {"run": "old", "step": 2, "changed": {"optimizer.lr": [0.0002, 1e-05]}}
    assert read_lineage(new.fork_receipt) == [first]

    write_json(new.checkpoints / "begun_from.json", {**WEIGHTS, "fork": receipt.digest})
    newer = fork_of(new, "new@2", "optimizer.lr=1e-5 training.seed=7", run="newer")
    write_receipt(newer.fork_receipt, begin_fork(newer))
    second = {"run": "new", "step": 2, "changed": {"training.seed": [42, 7]}}
    assert read_lineage(newer.fork_receipt) == [first, second]
    assert dict(read_receipt(newer.fork_receipt).inputs) == WEIGHTS
    assert refusals(newer) == [], "the last of its ancestors is its parent"
    of_the_first = fork_of(old, "old@2", "optimizer.lr=1e-5 training.seed=7", run="newer")
    assert refusals(of_the_first) == [("fork", "old@2", "new@2, from which newer was forked")]


def test_a_fork_that_was_killed_begins_again(old: Paths) -> None:
    new = fork_of(old)
    half = CheckpointFolder(new.checkpoints, keep=2)
    half.begin(2)
    (half.partial(2) / "__0_0.distcp").write_bytes(b"half")
    first = begin_fork(new)
    assert begin_fork(new) == first, "committed, but the receipt was not written"
    CheckpointFolder(new.checkpoints, keep=1).check_content(2)


def test_a_fork_of_a_run_that_somebody_trains_waits_for_nobody(old: Paths) -> None:
    new = fork_of(old)
    new.train.mkdir(parents=True)
    with Lease(new.train, new.lease), pytest.raises(LeaseHeldError):
        begin_fork(new)


def test_its_parents_later_steps_and_end_do_not_matter(old: Paths) -> None:
    new = fork_of(old)
    write_receipt(new.fork_receipt, begin_fork(new))
    CheckpointFolder(old.checkpoints, keep=1).begin(6)
    for _, folder in committed_checkpoints(old.checkpoints):
        for path in folder.iterdir():
            path.unlink()
    CheckpointFolder(new.checkpoints, keep=1).check_content(2)
    assert check_fork(new) == []
    for other in ("old@4", "old@1", "older@2", "a@2"):
        assert refusals(fork_of(old, other)) == [("fork", other, "old@2, from which new was forked")]


def test_the_same_experiment_forked_has_a_name_of_its_own(old: Paths) -> None:
    forks = ({}, {"fork": "old@2"}, {"fork": "old@4"}, {"fork": "older@2"})
    names = {paths_of(old.run.parent, **fork).run.name for fork in forks}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("fork", "overrides", "expected"),
    [
        ("oldd@2", "", ("fork", "oldd@2", "old")),
        ("old@3", "", ("fork", "old@3", "a step whose checkpoint old has: 2, 4")),
        ("old@4", "training.num_steps=4", ("training.num_steps", "4", "more than 4")),
        ("old@4", "training.num_steps=3", ("training.num_steps", "3", "more than 4")),
        ("old@2", "model.architecture.vocab_size=512", ("model.architecture.vocab_size", "512", "{}, as in old")),
        ("old@2", "trainer.params_dtype=bf16", ("trainer.params_dtype", "bf16", "fp32, as in old")),
    ],
)
def test_a_bad_fork_is_refused(old: Paths, fork: str, overrides: str, expected: tuple[str, str, str]) -> None:
    key, value, allowed = expected
    theirs = old.resolved.config.model.architecture.vocab_size
    assert refusals(fork_of(old, fork, overrides)) == [(key, value, allowed.format(theirs))]


def test_a_checkpoint_that_lacks_a_file_is_refused_with_its_name(old: Paths) -> None:
    (old.checkpoints / "step_000002" / "__1_0.distcp").unlink()
    (problem,) = check_fork(fork_of(old))
    assert "__1_0.distcp: missing, expected 2000 bytes" in problem.remedy
    with rejected("checkpoint-damaged", "missing", key="fork"):
        begin_fork(fork_of(old))


@pytest.mark.parametrize("steps", [(1,), (3,), (1, 2), (2, 3), (1, 3)])
def test_a_run_that_has_begun_otherwise_is_refused(old: Paths, steps: tuple[int, ...]) -> None:
    new = fork_of(old)
    commit_empty(new, *steps)
    ((key, value, allowed),) = refusals(new)
    assert (key, value) == ("fork", "old@2")
    own = [step for step in steps if step != 2]
    assert allowed == f"a run that has not begun; new has checkpoints of its own (step {own[-1]})"


def test_the_parents_step_alone_is_no_other_beginning(old: Paths) -> None:
    new = fork_of(old)
    commit_empty(new, 2)
    assert refusals(new) == []


def commit_empty(paths: Paths, *steps: int) -> None:
    checkpoints = CheckpointFolder(paths.checkpoints, keep=9)
    for step in steps:
        checkpoints.begin(step)
        checkpoints.write_manifest(step, [])
        checkpoints.commit(step)


def test_one_step_more_than_the_parents_is_enough(old: Paths) -> None:
    assert refusals(fork_of(old, "old@4", "training.num_steps=5")) == []


def test_a_parent_of_another_precision_is_refused_either_way(old: Paths) -> None:
    written = old.config.read_text()
    assert written.count('params_dtype: "fp32"') == 1
    write_text(old.config, written.replace('params_dtype: "fp32"', 'params_dtype: "bf16"'))
    (problem,) = check_fork(fork_of(old))
    assert (problem.key, problem.value, problem.allowed) == ("trainer.params_dtype", "fp32", "bf16, as in old")
    assert problem.remedy == "set='trainer.params_dtype=bf16'"


def test_a_name_that_is_nearly_right_is_guessed(old: Paths) -> None:
    begin_run(old.run.parent, "elder")
    (problem,) = check_fork(fork_of(old, "eldr@2"))
    assert problem.allowed == "elder, old"
    assert "elder" in problem.remedy


def test_all_reasons_are_told_at_once(old: Paths) -> None:
    new = fork_of(old, "old@3", "trainer.params_dtype=bf16 model.architecture.vocab_size=512 training.num_steps=3")
    commit_empty(new, 1)
    assert [(key, allowed.partition(" ")[0]) for key, _, allowed in refusals(new)] == [
        ("fork", "a"),
        ("fork", "a"),
        ("model.architecture.vocab_size", f"{old.resolved.config.model.architecture.vocab_size},"),
        ("trainer.params_dtype", "fp32,"),
        ("training.num_steps", "more"),
    ]
    with pytest.raises(ConfigError) as refused:
        begin_fork(new)
    assert len(refused.value.problems) == 5


def test_a_run_that_is_no_fork_is_none_of_this(old: Paths) -> None:
    assert check_fork(old) == []
    assert read_lineage(old.fork_receipt) == []


def test_without_any_run_there_is_none_to_name(tmp_path: Path) -> None:
    new = paths_of(tmp_path / "results", run="new", fork="old@2")
    (problem,) = check_fork(new)
    assert problem.allowed == f"a run in {tmp_path / 'results'}, which has none"
    assert problem.remedy == "`snakemake status --cores 1` shows all runs"


def test_a_fork_of_a_parent_without_checkpoints_names_none(old: Paths) -> None:
    for _, folder in committed_checkpoints(old.checkpoints):
        folder.rename(folder.with_suffix(".expired"))
    (problem,) = check_fork(fork_of(old))
    assert problem.allowed == "a step whose checkpoint old has: none yet"


def test_a_fork_that_is_complete_is_not_made_again(old: Paths) -> None:
    new = fork_of(old)
    begin_fork(new)
    before = {path: path.stat().st_ctime_ns for path in new.train.rglob("*") if "lease" not in str(path)}
    begin_fork(new)
    assert {path: path.stat().st_ctime_ns for path in before} == before


def test_how_many_bytes_were_copied_is_told(old: Paths, monkeypatch, caplog) -> None:
    monkeypatch.setattr("posttrain.rl.training.fork.hard_link", lambda source, target: False)
    begin_fork(fork_of(old))
    size = sum(path.stat().st_size for path in (old.checkpoints / "step_000002").iterdir())
    assert f"{size:,} bytes were copied: the file system has no hard links from " in caplog.text
    assert f"{old.checkpoints / 'step_000002'}" in caplog.text


def test_what_the_receipt_of_a_fork_proves(old: Paths) -> None:
    new = fork_of(old)
    receipt = begin_fork(new)
    manifest = new.checkpoints / "step_000002" / "manifest.json"
    assert receipt.files == ()
    assert dict(receipt.inputs) == WEIGHTS, "the weights alone: not the dataset, nor what engines began with"
    assert receipt.settings["manifest_xxh3_128"] == xxhash.xxh3_128(manifest.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_parent_whose_beginning_cannot_be_read_is_named(old: Paths, content: str) -> None:
    old.begun_from.write_text(content)
    with rejected("checkpoint-unreadable", old.begun_from):
        begin_fork(fork_of(old))


@pytest.mark.parametrize("fork", ["old", "old@", "old@0", "old@two", "../old@2", "2", "new@2"])
def test_what_is_no_run_and_step_is_refused(tmp_path: Path, fork: str) -> None:
    with pytest.raises(ConfigError) as refused:
        paths_of(tmp_path, run="new", fork=fork)
    assert [problem.key for problem in refused.value.problems] == ["fork"]
