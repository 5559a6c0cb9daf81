"""Every family in every layout computes what one rank does: losses, gradients, and the moves of three updates."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from tests.support.family_updates import DIMENSIONS, num_ranks, products
from tests.support.megatron_single import run_gangs
from tests.support.tiny_checkpoint import ALL, QWEN3_5, TINY_YARN, TRAINED, make_random_checkpoint

FAMILIES = {
    **ALL,
    "glm_moe_dsa": TRAINED,
    # Keys wider than values; as in DeepSeek-V3 a token chooses twice as many experts as groups.
    "deepseek_v3_yarn": dataclasses.replace(TINY_YARN, v_head_dim=12, num_experts_per_tok=4),
    # A key head of delta nets for each of four ranks.
    **{
        family: dataclasses.replace(arch, num_hidden_layers=3, linear_num_key_heads=4, linear_num_value_heads=8)
        for family, arch in QWEN3_5.items()
    },
}
# With layers for two stages of two chunks; where layers share a choice of keys, a chunk begins with one that chooses.
DEEPER = {
    f"{family}_deeper": dataclasses.replace(arch, num_hidden_layers=4 * arch.index_topk_freq)
    for family, arch in FAMILIES.items()
}
# In every change: one model of each `model_type`, and one whose layers share a choice of keys.
ONE_EACH = ("glm_moe_dsa", "deepseek_v3_yarn", "glm4_moe", "qwen3", "qwen3_moe", "deepseek_v32", "glm_moe_dsa_sharing")
# With one rank alone, each pair of dimensions in each of its four ways. Each family gets one of them.
COVER = (
    "tensor pipeline",
    "tensor context",
    "pipeline data expert",
    "pipeline context",
    "tensor data",
    "context data expert",
    "tensor expert",
)
# Delta nets: heads on tensor- and context-parallel ranks at once, stages, and experts.
DELTA_NETS = (
    ("tensor context", "qwen3_5"),
    ("pipeline data", "qwen3_5"),
    ("tensor data expert", "qwen3_5_moe"),
    ("pipeline context", "qwen3_5_moe"),
)
# Of the products beyond pairs, that whose experts' ranks exchange parts of different sizes.
SHARED_EXPERTS = ("tensor data expert expert_tensor", "qwen3_moe")
# Tied embeddings; experts; layers that share a choice of keys.
INTERLEAVED = (
    ("pipeline interleaved", "qwen3_deeper"),
    ("pipeline data expert interleaved", "qwen3_moe_deeper"),
    ("pipeline context interleaved", "glm_moe_dsa_sharing_deeper"),
)
# Kernels that add up in one order on every CPU of today: with others, rounding is another and passes a bound by chance.
SAME_SUMS = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"}
LOSS, GRADIENT, MOVE = 1e-6, 2e-6, 2e-5
# Sums that cancel keep their rounding: with some random weights one gradient of thousands is beyond the bound.
SEEDS = {"qwen3_untied": 5, "qwen3_5": 2, "qwen3_5_moe_deeper": 4, "deepseek_v3_deeper": 4, "qwen3_moe_deeper": 4}
# Rounding adds up over layers: eight of them move up to 2.1e-5 apart without interleaving, too.
MOVES = {"glm_moe_dsa_sharing_deeper": 2 * MOVE}


def test_the_cover_has_every_pair() -> None:
    layouts = [set(layout.split()) for layout in ("", *COVER)]
    for pair in itertools.combinations((*DIMENSIONS, "expert"), 2):
        assert {tuple(name in layout for name in pair) for layout in layouts} == set(
            itertools.product((False, True), repeat=2)
        ), pair


def test_all_products_are_there() -> None:
    dense, sparse = (list(products(has_experts)) for has_experts in (False, True))
    pairs = [" ".join(pair) for pair in itertools.combinations(("tensor", "pipeline", "context", "data"), 2)]
    assert dense == ["tensor", "pipeline", "context", "data", *pairs]
    spread = [layout for layout in dense if layout != "pipeline"]
    assert set(sparse) - set(dense) == {
        *(f"{layout} expert" for layout in spread),
        *("tensor context expert expert_tensor", "tensor data expert expert_tensor"),
    }
    assert {num_ranks(layout) for layout in sparse} == {2, 4}


def test_layouts_that_cover_all_pairs(tmp_path: Path) -> None:
    """About half a minute of two cores: 7 models by one rank each, and 11 gangs, of which most have four ranks."""
    cases = [*zip(COVER, ONE_EACH, strict=True), SHARED_EXPERTS, *DELTA_NETS, *INTERLEAVED]
    # A model without experts has none to spread.
    assert not [(layout, family) for layout, family in cases[:7] if "expert" in layout and not has_experts(family)]
    hold_against_one_rank(tmp_path, cases)


@pytest.mark.faults("layouts")
def test_all_layouts(tmp_path: Path) -> None:
    cases = [(layout, family) for family, arch in FAMILIES.items() for layout in products(arch.n_routed_experts > 0)]
    hold_against_one_rank(tmp_path, cases)


@pytest.mark.faults("layouts")
def test_all_interleaved_layouts(tmp_path: Path) -> None:
    cases = [
        (f"{layout} interleaved", family)
        for family, arch in DEEPER.items()
        for layout in products(arch.n_routed_experts > 0)
        if "pipeline" in layout.split()
    ]
    hold_against_one_rank(tmp_path, cases)


def hold_against_one_rank(folder: Path, cases: list[tuple[str, str]]) -> None:
    families = {family: (FAMILIES | DEEPER)[family] for _, family in cases}
    for family, arch in families.items():
        make_random_checkpoint(folder / family / "hf", arch, SEEDS.get(family, 3))
        (folder / family / "architecture.json").write_text(json.dumps(dataclasses.asdict(arch)))
    run_gangs(
        "family_updates",
        {"folder": str(folder), "cases": [*(("", family) for family in families), *cases]},
        timeout=3000,
        environment=SAME_SUMS,
    )
    found = {
        case: off for ranks in (2, 4) for case, off in json.loads((folder / f"found{ranks}.json").read_text()).items()
    }
    assert len(found) == len(set(cases))
    print(*(f"{case}: {off}" for case, off in found.items()), sep="\n")
    far = {case: off for case, off in found.items() if not is_near(off, MOVES.get(case.partition(":")[0], MOVE))}
    assert far == {}


def has_experts(family: str) -> bool:
    return FAMILIES[family].n_routed_experts > 0


def is_near(off: dict, move: float) -> bool:
    largest = max(off["loss"], off["grad_norm"])
    return largest <= LOSS and off["gradient"][1] <= GRADIENT and off["move"][1] <= move
