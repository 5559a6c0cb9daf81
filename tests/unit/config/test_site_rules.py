"""Wrong keys of a site are refused before anything is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import merge
from posttrain.config.rules import check_trainable
from posttrain.config.site_rules import time_limit_minutes
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"

VIOLATIONS = (
    ("site.trainer_environment=[NCCL_DEBUG]", "site.trainer_environment"),
    ("site.engine_environment=['1X=2']", "site.engine_environment"),
    ("hardware.kernels.environment=[NCCL_P2P_LEVEL]", "hardware.kernels.environment"),
    ("site.slurm.time_limit=7-00:00:00", "site.slurm.time_limit"),
    ("site.slurm.time_limit=10m", "site.slurm.signal_seconds"),
    ("site.slurm.extra_options=[--partition=gpu]", "site.slurm.extra_options"),
    ("site.slurm.extra_options=['-p gpu']", "site.slurm.extra_options"),
    ("site.slurm.gpu_option=--gres=gpu:8", "site.slurm.gpu_option"),
    ("site.node_names=[a]", "site.node_names"),
    ("site.price_per_gpu_hour=2.5", "site.currency"),
    ("site.price_per_gpu_hour=-1", "site.price_per_gpu_hour"),
)


@pytest.mark.parametrize(("setting", "key"), VIOLATIONS)
def test_a_wrong_key_is_named(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        merge({"model": "tiny", "site": "example_slurm", "set": setting}, CONFIG_DIR)
    assert {problem.key for problem in raised.value.problems} == {key}


SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "TOKEN", "GIT_PASSWD")
NO_SECRETS = ("TOKENIZERS_PARALLELISM", "NCCL_IB_HCA", "SGLANG_KEYBOARD", "MAX_TOKENS", "MONKEY")


@pytest.mark.parametrize("where", ["trainer_environment", "engine_environment"])
def test_a_secret_is_refused_without_being_shown_and_other_variables_are_not(where: str) -> None:
    for name in SECRETS:
        with pytest.raises(ConfigError) as raised:
            merge({"model": "tiny", "site": "local", "set": f"site.{where}=[{name}=hf_canary]"}, CONFIG_DIR)
        (problem,) = raised.value.problems
        assert (problem.key, problem.value) == (f"site.{where}", f"{name}=...")
        assert "hf_canary" not in str(raised.value)
    given = ",".join(f"{name}=1" for name in NO_SECRETS)
    merge({"model": "tiny", "site": "local", "set": f"site.{where}=[{given}]"}, CONFIG_DIR)


def test_several_nodes_need_a_launcher() -> None:
    for site, refused in (("local", ["nodes"]), ("slurm_localhost", []), ("example_kubernetes", [])):
        config = merge({"model": "tiny", "site": site, "nodes": 2}, CONFIG_DIR).config
        assert [problem.key for problem in check_trainable(config)] == refused


def test_time_limits() -> None:
    assert [time_limit_minutes(limit) for limit in ("90m", "36h", "7d")] == [90, 2160, 10080]
