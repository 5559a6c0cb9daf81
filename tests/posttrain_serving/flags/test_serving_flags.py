"""The environment of engines that serve: what training's engines get of the hardware, and the site's own words."""

from posttrain.plan.flags.environment import hardware_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.flags.sglang_flags import environment_flags
from posttrain_serving.flags.serving_flags import serving_environment

NVLINK = "NCCL_P2P_LEVEL"


def test_what_the_hardware_needs_is_what_engines_of_training_get(resolved):
    config = resolved("qwen3_4b", hardware="rtx_pro_6000").config
    served = as_environment(serving_environment(config))
    assert served.items() >= as_environment(hardware_environment(config, is_alone=True)).items()
    assert served.items() <= as_environment(environment_flags(config)).items()


def test_prefill_and_decode_are_on_different_nodes(resolved):
    config = resolved("qwen3_4b", hardware="rtx_pro_6000").config
    assert "NCCL_IB_DISABLE" not in as_environment(serving_environment(config, "decode"))


def test_a_sites_own_word_is_the_last(resolved):
    config = resolved("qwen3_4b", hardware="rtx_pro_6000", set=f"site.engine_environment=[{NVLINK}=SYS]").config
    assert as_environment(serving_environment(config))[NVLINK] == "SYS"
