"""What each choice of `stage.copy` takes on nodes of GLM-5, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.config.schema import Config
from posttrain.plan.sizing.node_copy import NodeCopy, node_copies, node_copy, rollout_bytes

# In BF16 and in FP8; of BF16, a layer's experts, what else is in a layer with experts, a dense layer, and both ends.
WHOLE, FP8 = 1_507_728_316_928, 756_162_687_872
ROUTED, REST, DENSE = 256 * 3 * 6144 * 2048 * 2, 427_457_024, 801_797_632
EMBEDDING = 154880 * 6144 * 2
FILE = 4 * 10**9
AWAKE = "engine.sleep=never engine.weight_transport=tensor engine.pd.num_prefill_engines=0"


def config_of(resolved: Any, words: str = "", nodes: int = 16, **parallel: int) -> Config:
    config = resolved("glm5", set=f"{PUBLISHED_LAYOUT} site.node_names=[] {words}").config
    return dataclasses.replace(config, nodes=nodes, parallel=dataclasses.replace(config.parallel, **parallel))


def test_everything_lies_on_every_node(resolved) -> None:
    nothing, slices, everything = node_copies(config_of(resolved))
    assert nothing == NodeCopy("nothing", 0, 0, 16, 0, 0)
    assert slices.choice == "slices"
    assert everything == NodeCopy("everything", WHOLE, WHOLE, 16, 16 * WHOLE, 16 * WHOLE)
    assert node_copy(config_of(resolved, "stage.broadcast=bittorrent"), "everything").shared_read_bytes == WHOLE


def test_engines_that_load_have_the_rollout_checkpoint_beside(resolved) -> None:
    awake, in_bf16 = config_of(resolved, AWAKE), config_of(resolved, f"{AWAKE} rollout.fp8=false")
    assert (rollout_bytes(awake), rollout_bytes(in_bf16)) == (FP8, WHOLE)
    assert node_copy(awake, "everything").node_bytes == WHOLE + FP8
    assert node_copy(in_bf16, "everything").node_bytes == 2 * WHOLE
    # An engine stands on each of the first 8 nodes.
    least, most = 20 * (REST + ROUTED // 4), 20 * (REST + ROUTED) + 6 * FILE
    first = EMBEDDING + 3 * DENSE + 17 * (REST + ROUTED // 4)
    slices = node_copy(awake, "slices")
    assert first < least
    assert (slices.least_bytes, slices.node_bytes) == (least + FP8, most + FP8)


def test_engines_of_their_own_nodes_need_nothing_of_the_trainer(resolved) -> None:
    words = "engine.own_nodes=8 engine.gpus_per_engine=16 engine.num_engines=3 engine.weight_transport=tensor"
    config = resolved("glm5", nodes=24, site="example_slurm", set=f"site.node_names=[] {words}").config
    copy = node_copy(config, "everything")
    # The last two nodes are spare, and get what an engine loads all the same.
    assert copy.all_nodes_bytes == 16 * WHOLE + 8 * FP8
    assert copy.node_bytes == WHOLE


def test_nodes_that_the_site_names_get_a_copy(resolved) -> None:
    names = ["a", "b", "c"]
    config = config_of(resolved)
    few = dataclasses.replace(config, site=dataclasses.replace(config.site, node_names=names))
    assert node_copy(few, "everything").all_nodes_bytes == 3 * WHOLE
    of_first = EMBEDDING + 3 * DENSE + 17 * (REST + ROUTED) + 6 * FILE
    assert node_copy(few, "slices").all_nodes_bytes == 3 * of_first
    many = dataclasses.replace(config, site=dataclasses.replace(config.site, node_names=[*"abcdefghijklmnopqrst"]))
    assert (node_copy(many, "nothing").num_nodes, node_copy(many, "everything").all_nodes_bytes) == (20, 20 * WHOLE)
    assert node_copy(many, "slices").all_nodes_bytes == node_copy(config, "slices").all_nodes_bytes


def test_a_slice_has_a_file_more_at_each_end_of_what_is_needed(resolved) -> None:
    """Three layers on 8 nodes: what a node needs is in up to 9 runs, of which it has an eighth of the experts."""
    config = config_of(
        resolved, nodes=208, pipeline_model_parallel_size=26, expert_model_parallel_size=64,
        num_layers_in_last_pipeline_stage=0,
    )  # fmt: skip
    slices = node_copy(config, "slices")
    last = 3 * (REST + ROUTED // 8) + EMBEDDING + 2 * 6144
    first, middle = EMBEDDING + 3 * DENSE, 3 * (REST + ROUTED // 8)
    assert slices.least_bytes == last
    assert slices.node_bytes == last + 18 * FILE
    # Nothing of a dense layer is left out, so that three runs remain.
    assert slices.all_nodes_bytes == 8 * (first + 6 * FILE) + 192 * (middle + 18 * FILE) + 8 * (last + 18 * FILE)


@pytest.mark.parametrize("model", ["tiny", "qwen3_4b"])
def test_a_slice_is_never_more_than_all(resolved, model: str) -> None:
    config = resolved(model).config
    slices, everything = node_copy(config, "slices"), node_copy(config, "everything")
    assert 0 < slices.least_bytes <= slices.node_bytes == everything.node_bytes


def test_a_dense_layer_beside_a_slice_of_experts_is_one_run(resolved) -> None:
    """Stages of four layers, the last of six: only a layer that leaves experts out is cut into two runs more."""
    config = config_of(
        resolved, nodes=152, pipeline_model_parallel_size=19, expert_model_parallel_size=64,
        num_layers_in_last_pipeline_stage=6,
    )  # fmt: skip
    part = REST + ROUTED // 8
    first, middle, last = EMBEDDING + 3 * DENSE + part, 4 * part, 6 * part + EMBEDDING + 2 * 6144
    nodes = 8 * (first + 10 * FILE) + 17 * 8 * (middle + 22 * FILE) + 8 * (last + 30 * FILE)
    assert node_copy(config, "slices").all_nodes_bytes == nodes
