"""The experts of a row's tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.rejections import rejected

from posttrain.rl.batching.packed_batch import build_packed_batch
from posttrain.rl.batching.routes import routes_of_row
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Trajectory

LAYERS, CHOSEN, EXPERTS = 5, 2, 6


def samples(folder: Path, lengths=((3, 4), (2, 5)), num_experts: int = EXPERTS) -> list[Trajectory]:
    plain = [
        Trajectory.of_response((1,) * p, (2,) * r, (-1.0,) * r, 0, prompt_id=0, sample_index=i, reward=0.0)
        for i, (p, r) in enumerate(lengths)
    ]
    generator, dtype = np.random.default_rng(0), np.uint8 if num_experts <= 256 else np.int16
    drawn = [generator.random((s.num_tokens - 1, LAYERS, num_experts)).argsort(-1)[..., :CHOSEN] for s in plain]
    routes = RolloutStore(folder).write_routes(0, 0, [[array.astype(dtype)] for array in drawn])
    return [dataclasses.replace(sample, routes=told) for sample, told in zip(plain, routes, strict=True)]


def whole(sample: Trajectory) -> np.ndarray:
    (routes,) = sample.routes
    return np.fromfile(routes.file, routes.dtype, int(np.prod(routes.shape)), offset=routes.offset).reshape(
        routes.shape
    )


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_each_sample_has_its_own_and_all_else_goes_round(tmp_path: Path, num_experts: int) -> None:
    given = samples(tmp_path, num_experts=num_experts)
    batch = build_packed_batch(given, (1, 0), multiple_of=20, sequence_multiple_of=4)
    row = routes_of_row(batch, [4, 1], CHOSEN, num_experts)
    assert row.shape == (2, 20, CHOSEN)
    assert row.element_size() == (1 if num_experts == EXPERTS else 2)
    for start, sample in ((0, given[1]), (8, given[0])):
        assert np.array_equal(row[:, start : start + 6], whole(sample)[[4, 1]])
    others = [6, 7, 14, 15, 16, 17, 18, 19]
    expected = [[(2 * place) % num_experts, (2 * place + 1) % num_experts] for place in others]
    assert row[:, others].tolist() == [expected, expected]


def test_a_row_of_padding_goes_round(tmp_path: Path) -> None:
    row = routes_of_row(build_packed_batch(samples(tmp_path), (), multiple_of=4), [0], CHOSEN, EXPERTS)
    assert row.tolist() == [[[0, 1], [2, 3], [4, 5], [0, 1]]]
    assert row.dtype == torch.uint8


def test_what_is_gone_is_named(tmp_path: Path) -> None:
    given = samples(tmp_path)
    batch = build_packed_batch(given, (0, 1))
    (path,) = tmp_path.glob("*/*.routes")
    path.write_bytes(path.read_bytes()[:-1])
    with rejected("routes-invalid", "chunk_0000.routes"):
        routes_of_row(batch, [0], CHOSEN, EXPERTS)
    path.unlink()
    with rejected("routes-invalid", "chunk_0000.routes", "No such file"):
        routes_of_row(batch, [0], CHOSEN, EXPERTS)


def test_samples_of_which_nobody_knows_are_refused(tmp_path: Path) -> None:
    given = [samples(tmp_path)[0], dataclasses.replace(samples(tmp_path)[1], routes=())]
    with pytest.raises(AssertionError, match="nobody knows"):
        routes_of_row(build_packed_batch(given, (0, 1)), [0], CHOSEN, EXPERTS)
