"""What a hardware's file sets for engines reaches those of training and those that serve alike."""

from __future__ import annotations

from posttrain.plan.flags.environment import hardware_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.flags.sglang_flags import environment_flags

NVLINK = "NCCL_P2P_LEVEL"


def test_engines_of_training_get_it_too(resolved):
    trained = as_environment(environment_flags(resolved("qwen3_4b", hardware="rtx_pro_6000").config))
    assert (trained[NVLINK], trained["NCCL_IB_DISABLE"]) == ("PHB", "1")
    assert NVLINK not in as_environment(environment_flags(resolved("qwen3_4b", hardware="h100").config))


def test_between_nodes_infiniband_is_the_way(resolved):
    config = resolved("qwen3_4b", hardware="rtx_pro_6000").config
    given = as_environment(hardware_environment(config, is_alone=False))
    assert "NCCL_IB_DISABLE" not in given
    assert NVLINK in given


def test_a_sites_own_word_is_the_last(resolved):
    config = resolved("qwen3_4b", hardware="rtx_pro_6000", set=f"site.engine_environment=[{NVLINK}=SYS]").config
    assert as_environment(environment_flags(config))[NVLINK] == "SYS"
