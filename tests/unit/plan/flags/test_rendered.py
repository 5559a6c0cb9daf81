import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import as_arguments, as_environment, as_mapping, flag
from posttrain.plan.flags.megatron_flags import optimizer_flags
from posttrain.plan.flags.rendered import rendered_flags
from posttrain.plan.flags.sglang_flags import (
    DECODE,
    PREFILL,
    deepep_tokens,
    environment_flags,
    expert_parallel_size,
    graph_batch_size,
    sglang_flags,
)


@pytest.fixture
def flags_of(resolved):
    def render(model, **more):
        found = resolved(model, **more)
        return rendered_flags(found.config, found.origins)

    return render


def test_a_flag_tells_value_origin_and_keys(flags_of):
    flags = flags_of("glm5", set="optimizer.lr=2e-6 engine.mtp_steps=3")
    assert flags["megatron.optimizer lr"] == {
        "value": 2e-6,
        "origin": "set=",
        "keys": ["optimizer.lr"],
        "reason": "",
    }
    assert flags["sglang.decode --tp-size"]["origin"] == "config/nodes/glm5_16.yaml"
    assert flags["megatron.optimizer adam_eps"]["origin"] == "config/base.yaml"
    assert flags["megatron.ddp grad_reduce_in_fp32"]["origin"] == "constant"
    assert flags["megatron.ddp grad_reduce_in_fp32"]["reason"]
    # decided by the model's file and by the schema's default
    assert flags["megatron.model moe_layer_freq"]["origin"] == "config/models/glm5.yaml"
    assert flags["sglang.decode --speculative-num-draft-tokens"]["value"] == 4


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_every_flag_has_a_key_that_exists_or_a_reason(resolved, flags_of, model):
    found = resolved(model)
    for name, item in flags_of(model).items():
        assert item["keys"] or item["reason"], name
        for key in item["keys"]:
            value = found.config
            for part in key.split("."):
                value = getattr(value, part)  # a key that is none raises


def test_a_constant_without_a_reason_is_refused():
    with pytest.raises(AssertionError, match="--x has neither a key nor a reason"):
        flag("--x", 1)


def test_the_trainer_fields_of_the_recipe(flags_of):
    """Numbers of `miles-glm5-recipe.txt`, by meaning."""
    flags = {name: item["value"] for name, item in flags_of("glm5", set=PUBLISHED_LAYOUT).items()}
    expected = {
        "megatron.model tensor_model_parallel_size": 4,
        "megatron.model pipeline_model_parallel_size": 4,
        "megatron.model context_parallel_size": 2,
        "megatron.model expert_model_parallel_size": 32,
        "megatron.model expert_tensor_parallel_size": 1,
        "megatron.model num_layers_in_last_pipeline_stage": 18,
        "megatron.model recompute_granularity": "full",
        "megatron.model recompute_method": "uniform",
        "megatron.model recompute_num_layers": 1,
        "megatron.model moe_token_dispatcher_type": "flex",
        "megatron.optimizer lr": 1e-6,
        "megatron.optimizer adam_beta2": 0.98,
        "megatron.optimizer weight_decay": 0.1,
        "trainer.env CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }
    assert {name: flags[name] for name in expected} == expected


def test_prefill_and_decode_have_a_batch_and_a_world_of_their_own(resolved):
    config = resolved(
        "glm5",
        set="engine.num_engines=1 engine.pd.num_prefill_engines=2 engine.pd.gpus_per_prefill_engine=16 "
        "engine.pd.max_running_requests=64",
    ).config
    prefill, decode = ({item.name: item.value for item in sglang_flags(config, role)} for role in (PREFILL, DECODE))
    assert (prefill["--tp-size"], decode["--tp-size"]) == (16, 64)
    assert (prefill["--nnodes"], decode["--nnodes"]) == (2, 8)
    assert (prefill["--max-running-requests"], decode["--max-running-requests"]) == (64, 512)
    assert (prefill["--chunked-prefill-size"], decode["--chunked-prefill-size"]) == (32768, 131072)
    assert "--cuda-graph-max-bs-decode" not in prefill
    # the recipe with prefill apart: graphs of 8, buffers for 32
    assert decode["--cuda-graph-max-bs-decode"] == 8
    names = {item.name: item.value for item in environment_flags(config, DECODE)}
    assert names["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == 32


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ("", 8),  # 64 samples on 64 GPUs; the recipe's
        ("rollout.rollout_batch_size=128", 8),  # 1,024 samples, of which 512 run at a time
        ("rollout.rollout_batch_size=128 engine.max_running_requests=1024", 16),
        ("rollout.rollout_batch_size=128 engine.dp_attention=false", 512),  # a GPU takes part in all of them
        ("rollout.rollout_batch_size=128 engine.dp_attention=false engine.mtp_steps=3", 256),  # what DeepEP takes
        ("rollout.rollout_batch_size=128 engine.graph_batch_size=4", 4),
    ],
)
def test_graphs_of_a_decode_engine_cover_a_step(resolved, settings, largest):
    assert graph_batch_size(resolved("glm5", set=settings).config, DECODE) == largest


def test_deepep_buffers_hold_the_largest_graph(resolved):
    config = resolved("glm5", set="engine.mtp_steps=3").config
    assert (graph_batch_size(config), deepep_tokens(config)) == (256, 1024)
    config = resolved("glm5", set="engine.mtp_steps=5").config
    # 1,024 tokens / 6 per request
    assert (graph_batch_size(config), deepep_tokens(config)) == (170, 1020)


def test_experts_are_cut_only_where_fp8_blocks_allow_it(resolved):
    few = "engine.dp_attention=false engine.gpus_per_engine="
    # 2,048 / 16 = 128: a block; 2,048 / 32 is half of one
    assert expert_parallel_size(resolved("glm5", set=f"{few}16").config) == 1
    assert expert_parallel_size(resolved("glm5", set=f"{few}32").config) == 32
    assert expert_parallel_size(resolved("glm5").config) == 64


def test_switches_take_no_value():
    words = as_arguments([flag("--tp-size", 8, "engine.gpus_per_engine"), flag("--sleep-on-idle", True, reason="idle")])
    assert words == ("--tp-size", "8", "--sleep-on-idle")


@pytest.mark.parametrize(("model", "hidden"), [("tiny", ""), ("glm5", None)])
def test_what_runs_on_a_cpu_sees_no_gpu(resolved, model, hidden):
    config = resolved(model).config
    for flags in (trainer_environment(config), environment_flags(config)):
        assert as_environment(flags).get("CUDA_VISIBLE_DEVICES") == hidden


def test_a_site_sets_variables_of_trainer_and_engines(resolved):
    config = resolved("tiny", site="example_slurm", nodes=2).config
    trainer, engine = as_environment(trainer_environment(config)), as_environment(environment_flags(config))
    assert trainer["NCCL_IB_HCA"] == "mlx5"
    assert engine["NVSHMEM_HCA_LIST"] == "mlx5_0,mlx5_1"
    assert "NVSHMEM_HCA_LIST" not in trainer


@pytest.mark.parametrize(
    ("choice", "of_trainer", "of_engine"),
    [
        ({"model": "tiny"}, "lo", None),
        ({"model": "tiny", "nodes": 2}, "ib0", None),
        ({"model": "tiny", "nodes": 2, "set": "engine.kind=sglang"}, "ib0", "ib0"),
        ({"model": "tiny", "set": "engine.kind=sglang"}, "lo", "lo"),
        ({"model": "glm5"}, "ib0", "ib0"),
    ],
)
def test_ranks_that_talk_to_each_other_do_so_over_the_interface_that_they_need(
    resolved, choice: dict, of_trainer: str, of_engine: str | None
) -> None:
    """An engine on one of several nodes gets weights from ranks on the others; the embedded one has no ranks."""
    config = resolved(choice.pop("model"), site="example_slurm", **choice).config
    for flags, interface in ((trainer_environment(config), of_trainer), (environment_flags(config), of_engine)):
        variables = as_environment(flags)
        assert variables.get("GLOO_SOCKET_IFNAME") == variables.get("NCCL_SOCKET_IFNAME") == interface


def test_a_preflight_of_spare_nodes_goes_over_the_network(resolved) -> None:
    config = resolved("tiny", site="example_slurm").config
    assert config.nodes == 1
    assert as_environment(trainer_environment(config, num_nodes=3))["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("settings", "lowest"),
    [
        ("optimizer.lr=2e-6", 2e-6),
        ("optimizer.lr=2e-6 optimizer.lr_schedule=cosine", 0.0),
        ("optimizer.lr=2e-6 optimizer.lr_schedule=cosine optimizer.lr_floor=0.1", 2e-7),
    ],
)
def test_the_lowest_learning_rate_is_where_the_schedule_ends(resolved, settings, lowest):
    found = as_mapping(optimizer_flags(resolved("tiny", set=settings).config))
    assert found["min_lr"] == pytest.approx(lowest)
