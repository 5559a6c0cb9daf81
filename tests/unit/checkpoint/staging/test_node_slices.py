"""Slices against Megatron's own order of ranks, and against the full table of GLM-5."""

from pathlib import Path

import pytest
from megatron.core.parallel_state import RankGenerator
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.checkpoint.formats.shard_writer import assign_shards
from posttrain.checkpoint.formats.torch_dist import MAX_FILE_BYTES, split_placements
from posttrain.checkpoint.param_names import Placement
from posttrain.checkpoint.staging.node_slices import is_needed
from posttrain.config.node_share import NodeShare, node_share
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.node_copy import FILE_BYTES, node_copy

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def config_of(model: str, more: str = ""):
    return resolve(
        {"model": model, "site": "local", "set": f"{PUBLISHED_LAYOUT} site.node_names=[] {more}"}, CONFIG_DIR
    ).config


@pytest.mark.parametrize("more", ["", "parallel.expert_tensor_parallel_size=2 parallel.expert_model_parallel_size=16"])
def test_nodes_hold_what_megatron_gives_their_ranks(more):
    config = config_of("glm5", more)
    parallel, ranks = config.parallel, config.nodes * 8
    pipeline, expert = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    order = RankGenerator(
        tp=parallel.expert_tensor_parallel_size,
        ep=expert,
        dp=ranks // (pipeline * expert * parallel.expert_tensor_parallel_size),
        pp=pipeline,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    expected: dict[int, dict[int, set[int]]] = {node: {} for node in range(config.nodes)}
    first = [0, 20, 40, 60, 78]
    for group_pp in order.get_ranks("pp"):
        for stage, rank in enumerate(group_pp):
            (group_ep,) = [group for group in order.get_ranks("ep") if rank in group]
            held = range(group_ep.index(rank) * 256 // expert, (group_ep.index(rank) + 1) * 256 // expert)
            for layer in range(first[stage], first[stage + 1]):
                expected[rank // 8].setdefault(layer, set()).update(held)
    for node, layers in expected.items():
        assert node_share(config, node).experts_of_layer == layers


def test_edges_and_engines():
    words = "engine.pd.num_prefill_engines=0 engine.weight_transport={} engine.sleep={}"
    config, by_turns, from_shards = (
        config_of("glm5", words.format(*way)) for way in (("tensor", "never"), ("tensor", "auto"), ("sharded", "never"))
    )
    shares = [node_share(config, node) for node in range(16)]
    assert not any(node_share(empty, node).loads_engine for node in range(16) for empty in (by_turns, from_shards))
    assert [node for node, share in enumerate(shares) if share.has_embedding] == [0, 1, 2, 3]
    assert [node for node, share in enumerate(shares) if share.has_output] == [12, 13, 14, 15]
    assert [node for node, share in enumerate(shares) if share.loads_engine] == list(range(8))


def test_a_node_that_only_engines_have_holds_nothing_of_the_trainer():
    words = "engine.own_nodes=8 engine.gpus_per_engine=16 engine.num_engines=3 engine.weight_transport=tensor"
    config = resolve({"model": "glm5", "nodes": 24, "site": "example_slurm", "set": words}, CONFIG_DIR).config
    shares = [node_share(config, node) for node in range(24)]
    assert [node for node, share in enumerate(shares) if share.has_ranks] == list(range(16))
    assert [node for node, share in enumerate(shares) if share.loads_engine] == list(range(16, 22))
    assert {layer for share in shares for layer in share.experts_of_layer} == set(range(78))
    assert not any(share.has_embedding or share.has_output for share in shares[16:])
    both = config_of("glm5", "engine.sleep=never engine.weight_transport=tensor")
    copy, together = node_copy(config, "everything"), node_copy(both, "everything")
    assert copy.node_bytes < together.node_bytes, "of the trainer alone"
    assert copy.all_nodes_bytes == 16 * copy.node_bytes + 8 * (together.node_bytes - copy.node_bytes)


@pytest.mark.parametrize(
    ("key", "box", "needed"),
    [
        ("decoder.layers.3.self_attention.linear_proj.weight", ((0, 0), (8, 8)), True),
        ("decoder.layers.4.self_attention.linear_proj.weight", ((0, 0), (8, 8)), False),
        ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", ((5, 0, 0), (1, 4, 8)), True),
        ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", ((6, 0, 0), (1, 4, 8)), False),
        ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", ((0, 0, 0), (256, 4, 8)), True),
        ("embedding.word_embeddings.weight", ((0, 0), (8, 8)), False),
        ("output_layer.weight", ((0, 0), (8, 8)), True),
        ("mtp.layers.0.eh_proj.weight", ((0, 0), (8, 8)), False),
        ("something.new", ((0,), (8,)), True),
    ],
)
def test_what_a_node_needs(key, box, needed):
    share = NodeShare({3: frozenset({4, 5})}, has_embedding=False, has_output=True, loads_engine=False)
    assert is_needed(key, box, share) is needed


def test_the_plan_bounds_what_the_slices_of_glm5_take():
    config = config_of("glm5", "engine.pd.num_prefill_engines=0 stage.copy=slices")
    files = _files(config)
    assert sum(placement.size_bytes for file in files for placement in file) == 1_507_728_316_928
    exact, whole = [], []
    for node in range(8, 16):  # no engine runs on these
        share = node_share(config, node)
        wanted = [[any(is_needed(p.key, box, share) for box in p.boxes) for p in file] for file in files]
        sizes = [sum(p.size_bytes for p in file) for file in files]
        exact.append(
            sum(p.size_bytes for f, w in zip(files, wanted, strict=True) for p, n in zip(f, w, strict=True) if n)
        )
        whole.append(sum(size for size, w in zip(sizes, wanted, strict=True) if any(w)))
    rollout = node_copy(config, "everything").node_bytes - 1_507_728_316_928
    plan = node_copy(config, "slices")
    assert FILE_BYTES == MAX_FILE_BYTES
    assert plan.least_bytes == max(exact) + rollout
    assert max(exact) < max(whole) < plan.node_bytes - rollout < 1_507_728_316_928 / 3


def _files(config) -> list[list[Placement]]:
    files = []
    for part in split_placements(config.model.architecture, config.convert.num_parts):
        by_name = {placement.hf_name: placement for placement in part}
        sizes = {name: placement.size_bytes for name, placement in by_name.items()}
        files += [[by_name[name] for name in names] for names in assign_shards(sizes, MAX_FILE_BYTES).values()]
    return files
