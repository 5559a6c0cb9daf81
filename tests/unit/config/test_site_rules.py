"""Wrong keys of a site are refused before anything is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.config.rules import check_trainable
from posttrain.config.site_rules import time_limit_minutes
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"

VIOLATIONS = (
    ("site.trainer_environment=[NCCL_DEBUG]", "site.trainer_environment"),
    ("site.engine_environment=['1X=2']", "site.engine_environment"),
    ("site.slurm.time_limit=7-00:00:00", "site.slurm.time_limit"),
    ("site.slurm.time_limit=10m", "site.slurm.signal_seconds"),
    ("site.slurm.extra_options=[--partition=gpu]", "site.slurm.extra_options"),
    ("site.slurm.extra_options=['-p gpu']", "site.slurm.extra_options"),
    ("site.slurm.gpu_option=--gres=gpu:8", "site.slurm.gpu_option"),
    ("site.node_names=[a]", "site.node_names"),
)


@pytest.mark.parametrize(("setting", "key"), VIOLATIONS)
def test_a_wrong_key_is_named(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve({"model": "tiny", "site": "example_slurm", "set": setting}, CONFIG_DIR)
    assert {problem.key for problem in raised.value.problems} == {key}


def test_several_nodes_need_a_launcher() -> None:
    for site, refused in (("local", ["nodes"]), ("slurm_localhost", []), ("example_kubernetes", [])):
        config = resolve({"model": "tiny", "site": site, "nodes": 2}, CONFIG_DIR).config
        assert [problem.key for problem in check_trainable(config)] == refused


def test_time_limits() -> None:
    assert [time_limit_minutes(limit) for limit in ("90m", "36h", "7d")] == [90, 2160, 10080]
