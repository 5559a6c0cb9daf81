import pytest
from tests.support.megatron_single import CONFIG_DIR

from posttrain.config.derived import layers_per_stage
from posttrain.config.families import chooses_keys, is_delta_net
from posttrain.plan.resolve import resolve
from posttrain_rehearsal.rank_subset import members, rehearsed_config, shallow, stage_size, stages_of


def resolved_of(model, **more):
    return resolve({"site": "local", "model": model, **more}, CONFIG_DIR)


def config_of(model, **more):
    return resolved_of(model, **more).config


@pytest.mark.parametrize(
    ("model", "nodes", "expected"),
    [
        # TP4 CP4 DP2, EP32: neighbours of tensor, context and data parallelism; all of a stage share the experts.
        ("glm5", 16, [stage * 32 + place for stage in range(4) for place in (0, 1, 4, 16)]),
        ("glm5_4layer", 1, [0, 1, 4]),
    ],
)
def test_every_kind_of_group_has_two_members(model, nodes, expected):
    assert members(config_of(model, nodes=nodes)) == expected


def test_a_quick_rehearsal_has_the_first_a_middle_and_the_last_stage():
    config = config_of("glm5", nodes=16)
    assert members(config, quick=True) == [stage * 32 + place for stage in (0, 1, 3) for place in (0, 1, 4, 16)]
    assert stages_of(config_of("glm5_4layer"), quick=True) == [0]


def test_few_layers_keep_every_kind_in_every_stage():
    config = shallow(config_of("glm5", nodes=16))
    assert config.model.architecture.num_hidden_layers == 16, "two of each of eight chunks"
    assert config.model.architecture.first_k_dense_replace == 1
    assert config.parallel.num_layers_in_last_pipeline_stage == 0


def test_few_layers_of_delta_nets_have_one_that_attends_in_each_chunk():
    config = shallow(config_of("qwen3.5_4b", set="parallel.pipeline_model_parallel_size=2"))
    arch = config.model.architecture
    assert arch.num_hidden_layers == 8
    assert [is_delta_net(arch, layer) for layer in range(8)] == 2 * [True, True, True, False]


def test_only_a_quick_rehearsal_leaves_out_layers():
    whole, quick = (rehearsed_config(resolved_of("glm5", nodes=16, quick=flag)) for flag in (0, 1))
    assert (whole.model.architecture.num_hidden_layers, quick.model.architecture.num_hidden_layers) == (78, 16)


def test_a_chunk_keeps_the_layers_that_share_a_choice_of_keys():
    config = shallow(config_of("glm5.2", nodes=16))
    first, last = layers_per_stage(config)
    assert (first, last) == (6, 4)
    assert [index for index in range(10) if chooses_keys(config.model.architecture, index)] == [0, 1, 2, first]


def test_a_model_of_few_layers_stays_whole():
    config = config_of("glm5_4layer")
    assert shallow(config) is config


def test_nodes_that_only_engines_have_hold_no_rank():
    config = config_of("glm5", nodes=24, set="engine.own_nodes=8")
    assert stage_size(config) * config.parallel.pipeline_model_parallel_size == 128
    assert max(members(config)) < 128
