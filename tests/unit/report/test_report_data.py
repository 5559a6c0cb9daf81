import os

import pytest
from tests.support.branches import CONFIG_DIR
from tests.support.rejections import rejected
from tests.support.synthetic_run import make_run

from posttrain.config.load import dump_resolved
from posttrain.plan.resolve import resolve
from posttrain.report.report_data import flat_config, git_commit, read_origins, read_run, rule_times
from posttrain.store import receipt_of


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path, num_steps=12)


def test_origins_are_read_back_for_every_value(made):
    resolved = made.paths.resolved
    origins = read_origins(made.inputs.config.read_text())
    assert origins == {key: resolved.origins.get(key, "schema default") for key in flat_config(resolved.config)}
    assert origins["site.store"] == "set="


def test_sources_are_told_with_where_each_value_came_from(tmp_path):
    said = "data.sources.own.train_file=a data.sources.own.heldout_file=b data.sources.own.weight=3"
    resolved = resolve({"model": "tiny", "site": "local", "set": f"data.kind=files {said}"}, CONFIG_DIR)
    origins = read_origins(dump_resolved(resolved))
    values = flat_config(resolved.config)
    assert values["data.sources.own.weight"] == 3
    assert origins["data.sources.own.weight"] == "set="
    assert origins == {key: resolved.origins.get(key, "schema default") for key in values}


def test_everything_is_read(made):
    run = read_run(made.inputs)
    assert len(run.rows) == run.num_steps == 12
    assert run.config == made.paths.resolved.config
    assert run.column("train/lr") == (list(range(1, 13)), [2e-4] * 12)
    assert len(run.attempts) == 2
    assert len(run.final_weights_sha256) == 64
    assert run.versions["torch"] != "not installed"


def test_times_are_taken_from_benchmarks_of_this_run_and_its_model_only(made):
    logs = made.inputs.logs
    other = logs / "train" / "tiny-00000000.benchmark.tsv"
    other.write_text("s\tmax_rss\n999\t1\n")
    times = read_run(made.inputs).times
    assert sum(time.seconds for time in times if time.rule == "train") == 151.3
    assert len([time for time in times if time.rule == "convert_hf_to_torch_dist"]) == 2
    assert {time.job.rsplit(".")[-1] for time in times if time.rule == "evaluate"} == {"before", "after"}


def test_a_run_whose_name_begins_with_this_ones_is_another_run(made):
    (made.paths.run.parent / f"{made.paths.run.name}-before").mkdir()
    path = made.inputs.logs / "evaluate" / f"{made.paths.run.name}-before.after.benchmark.tsv"
    path.write_text("s\tmax_rss\n7\t1\n")
    jobs = {time.job for time in read_run(made.inputs).times}
    assert f"{made.paths.run.name}.after" in jobs
    assert f"{made.paths.run.name}-before.after" not in jobs


def test_a_rule_without_a_benchmark_is_timed_by_its_history(made):
    for path in (made.inputs.logs / "finalize_export_hf").iterdir():
        path.unlink()
    history = receipt_of(made.paths.hf_export).with_name("hf.history.jsonl")
    history.write_text('{"step": "finalize_export_hf", "finished_unix": 5.0, "seconds": 2.5}\n')
    assert [time.seconds for time in read_run(made.inputs).times if time.rule == "finalize_export_hf"] == [2.5]


def test_a_job_too_short_to_be_sampled_has_no_memory(made):
    path = next((made.inputs.logs / "export_hf").iterdir())
    path.write_text("s\th:m:s\tmax_rss\n0.01\t0:00:00\t-\n")
    (time,) = [time for time in rule_times(made.inputs.logs, made.paths, []) if time.rule == "export_hf"]
    assert (time.seconds, time.max_rss_mb) == (0.01, None)


@pytest.mark.parametrize(("seconds", "memory"), [(0.45, None), (4.99, None), (5.0, 6.46), (131.3, 6.46)])
def test_memory_is_known_of_jobs_that_lived_long_enough_to_be_sampled(made, seconds, memory):
    """Snakemake looks every half second; a job of 0.45 s was seen with 230 kB, before Python had begun."""
    path = next((made.inputs.logs / "export_hf").iterdir())
    path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:00\t6.46\n")
    (time,) = [time for time in rule_times(made.inputs.logs, made.paths, []) if time.rule == "export_hf"]
    assert (time.seconds, time.max_rss_mb) == (seconds, memory)


def test_metrics_that_do_not_cover_every_step_are_refused(made):
    path = made.paths.train / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with rejected("metrics-incomplete", "11 rows, steps 1 to 11; done.json says 12"):
        read_run(made.inputs)


def test_missing_inputs_are_named(made):
    made.inputs.after.unlink()
    with rejected("result-unreadable", "after.json"):
        read_run(made.inputs)


def test_no_commit_is_shown_outside_of_a_checkout(tmp_path):
    assert git_commit(tmp_path) == ""
    assert git_commit(tmp_path / "absent") == ""


def test_the_commit_of_a_checkout_and_its_changes_are_shown(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    git = f"git -C {tmp_path} -c user.name=n -c user.email=e@x"
    (tmp_path / "file").write_text("1")
    assert os.system(f"git init -q {tmp_path} && {git} add file && {git} commit -q -m 1") == 0
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit} (with local changes)"
