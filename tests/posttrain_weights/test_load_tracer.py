"""Where a model keeps what it is sent: found without numbers, and right once there are some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from posttrain_weights.box import Box
from posttrain_weights.load_tracer import LoadWeightsTracer

Tensors = Mapping[str, torch.Tensor]
Load = Callable[[Tensors, Tensors], None]
SHAPES = {"a": (8, 6), "b": (4, 6), "v": (6,), "w": (6,), "scalar": ()}


def qkv(kept: Tensors, sent: Tensors) -> None:
    kept["p"].data[2:6].copy_(sent["a"].narrow(0, 4, 4))
    kept["p"].data[6:8].copy_(sent["b"][2:])


def columns(kept: Tensors, sent: Tensors) -> None:
    kept["p"].data[:, :3].copy_(sent["a"].chunk(2, dim=1)[1])


def experts(kept: Tensors, sent: Tensors) -> None:
    kept["stack"].data[1].narrow(0, 4, 4).copy_(sent["b"].unsqueeze(0)[0])
    kept["stack"].data[2][:4].copy_(sent["b"].clone())


def turned(kept: Tensors, sent: Tensors) -> None:
    kept["q"].data.copy_(sent["a"].t())


def fused(kept: Tensors, sent: Tensors) -> None:
    whole = torch.cat([sent["a"][:5], sent["b"]], dim=0)
    kept["p"].data.copy_(whole[1:].to("cpu", torch.float64))


def beside(kept: Tensors, sent: Tensors) -> None:
    kept["wide"].data.copy_(torch.cat([sent["a"][:4], sent["b"]], dim=1))


def heads(kept: Tensors, sent: Tensors) -> None:
    kept["p"].data.copy_(sent["a"].view(4, 2, 6)[:, :].reshape(8, 6))


def vectors(kept: Tensors, sent: Tensors) -> None:
    kept["v"].data[2:8].copy_(sent["v"])
    kept["v"].data[0].copy_(sent["scalar"])
    kept["v"].data[8:].copy_(torch.cat([sent["v"][4:], sent["w"]])[1:4])


CASES: dict[str, tuple[Load, int]] = {
    "qkv": (qkv, 36),
    "columns": (columns, 24),
    "experts": (experts, 48),
    "turned": (turned, 48),
    "fused": (fused, 48),
    "beside": (beside, 48),
    "heads": (heads, 48),
    "vectors": (vectors, 10),
}


def parameters() -> dict[str, torch.Tensor]:
    shapes = {"p": (8, 6), "q": (6, 8), "stack": (3, 8, 6), "wide": (4, 12), "v": (11,)}
    return {name: torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in shapes.items()}


def followed(
    load: Load, kept: Tensors, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "F32"
) -> LoadWeightsTracer:
    record = LoadWeightsTracer(kept)
    with torch.no_grad(), record:
        load(kept, {name: record.sent(name, list(shape), dtype) for name, shape in shapes.items()})
    return record


@pytest.mark.parametrize("case", CASES)
def test_parts_are_where_numbers_go(case: str) -> None:
    load, size = CASES[case]
    kept = parameters()
    record = followed(load, kept)
    assert all(torch.equal(p, torch.full_like(p, -1.0)) for p in kept.values()), "nothing is written meanwhile"
    sent = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    load(kept, sent)
    assert record.derived == {}
    found = torch.zeros(0)
    for part in record.kept:
        row, column, rows, columns = part.box
        (*_, whole) = (sent[part.name].reshape(-1, sent[part.name].shape[-1] if sent[part.name].dim() else 1),)
        expected = whole[row : row + rows, column : column + columns]
        assert torch.equal(part.view(kept[part.parameter]), expected), part
        found = torch.cat([found, expected.flatten()])
    written = torch.cat([p.flatten() for p in kept.values()])
    assert torch.equal(found.sort().values, written[written >= 0].sort().values)
    assert len(found) == size


@pytest.mark.parametrize(
    "load",
    [
        lambda kept, sent: kept["p"].data.copy_(sent["a"] + 1),
        lambda kept, sent: kept["p"].data.copy_(sent["a"].view(4, 2, 6).transpose(0, 1).reshape(8, 6)),
        lambda kept, sent: kept["p"].data[:4].copy_(sent["a"][::2]),
        lambda kept, sent: kept["p"].data.copy_(sent["b"].repeat(2, 1)),
        lambda kept, sent: kept["p"].data[:4].copy_(sent["b"] * sent["v"]),
    ],
    ids=["arithmetic", "permuted", "every second row", "repeated", "of two"],
)
def test_what_is_no_copy_is_told(load: Load) -> None:
    record = followed(load, parameters())
    assert record.kept == []
    assert set(record.derived) == {"p"}


def test_the_same_copy_twice_is_one_and_another_copy_to_its_place_is_told() -> None:
    def same(kept: Tensors, sent: Tensors) -> None:
        for _ in range(2):
            kept["p"].data[:4].copy_(sent["b"])

    def other(kept: Tensors, sent: Tensors) -> None:
        for half in sent["a"].split(4):
            kept["p"].data[:4].copy_(half)

    once, twice = followed(same, parameters()), followed(other, parameters())
    assert [(part.name, part.offset) for part in once.kept] == [("b", 0)]
    assert [len(writes) for writes in once.parts["p"].values()] == [1]
    assert [len(writes) for writes in twice.parts["p"].values()] == [2]


def test_numbers_that_codes_and_scales_stand_for_are_those_of_the_codes() -> None:
    """As SGLang keeps the indexer's key projection of GLM-5, fused with another."""
    shapes = {"x.weight": (4, 6), "x.weight_scale_inv": (2, 2), "y": (4, 6)}

    def load(kept: Tensors, sent: Tensors) -> None:
        scales = sent["x.weight_scale_inv"].repeat_interleave(2, 0).repeat_interleave(4, 1)[:4, :6]
        kept["p"].data[:4].copy_((sent["x.weight"].to(torch.float32) * scales).to(torch.bfloat16))
        kept["p"].data[4:].copy_(sent["y"])

    record = followed(load, parameters(), shapes, "F8_E4M3")
    assert record.derived == {}
    assert [(part.name, part.box, part.offset) for part in record.kept] == [
        ("x.weight", Box(0, 0, 4, 6), 0),
        ("y", Box(0, 0, 4, 6), 24),
    ]
    assert record.read == {*shapes}


def test_a_shape_that_does_not_fit_fails_as_it_would() -> None:
    with pytest.raises(RuntimeError, match="expanded size"):
        followed(lambda kept, sent: kept["p"].data.copy_(sent["b"]), parameters())
    record = followed(lambda kept, sent: kept["p"].data.copy_(sent["v"]), parameters())
    assert record.odd == ["v [6] into [8, 6] of p"]
    assert record.kept == []
