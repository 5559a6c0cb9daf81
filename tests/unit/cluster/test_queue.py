from pathlib import Path

import pytest

from posttrain.cluster.queue import QueuedJob, parse_squeue, queued_jobs

LISTED = """\
17|RUNNING|1:02:03|16|None|rule_train_grpo|/runs/a
18|PENDING|0:00|1|Resources|rule_export_hf_wildcards_0|/runs/a
19|RUNNING|5:00|4|None|rule_train_grpo|/runs/b
"""


def test_only_the_jobs_of_this_folder_are_told():
    assert parse_squeue(LISTED, Path("/runs/a")) == [
        QueuedJob("17", "RUNNING", "1:02:03", "16", "None", "rule_train_grpo"),
        QueuedJob("18", "PENDING", "0:00", "1", "Resources", "rule_export_hf_wildcards_0"),
    ]
    assert parse_squeue("", Path("/runs/a")) == []


def test_one_machine_has_no_queue_and_nothing_is_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queued_jobs("local", tmp_path) == []


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="squeue --me"):
        queued_jobs("slurm", tmp_path)
