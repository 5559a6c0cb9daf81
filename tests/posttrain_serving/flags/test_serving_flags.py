"""The environment of engines that serve: what training's engines get of the hardware, and the site's own words."""

from posttrain.plan.flags.environment import hardware_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.flags.sglang_flags import environment_flags
from posttrain_serving.flags.serving_flags import parsers, serving_environment
from posttrain_serving.flags.vllm_flags import vllm_flags

NVLINK = "NCCL_P2P_LEVEL"
DTYPES = ("bfloat16", "float32")


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


def test_qwen3_5_has_its_parsers_in_both_engines(resolved):
    config = resolved("qwen3.5_4b").config
    named = {item.name: item.value for item in parsers(config)}
    assert named == {"--reasoning-parser": "qwen3", "--tool-call-parser": "qwen3_coder"}
    assert named.items() <= {item.name: item.value for item in vllm_flags(config)}.items()


def test_a_convolutions_states_have_the_engines_precision(resolved):
    words = "engine.kind=sglang engine.dtype="
    told = [as_environment(environment_flags(resolved("qwen3.5_4b", set=words + dtype).config)) for dtype in DTYPES]
    assert [one.get("SGLANG_MAMBA_CONV_DTYPE") for one in told] == [None, "float32"]
    other = resolved("qwen3_4b", set=words + "float32").config
    assert "SGLANG_MAMBA_CONV_DTYPE" not in as_environment(environment_flags(other))
