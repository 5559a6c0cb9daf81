"""Finished sample groups on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.support.rejections import rejected

from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Prompt, Sample, SampleGroup

# Numbers that lose bits when they are written with few digits.
LOGPROBS = (-0.1, -1.0000000000000002, -5e-324)


def group(prompt_id: int) -> SampleGroup:
    prompt = Prompt(prompt_id, ({"role": "user", "content": "sort 3 1 2 – bitte"},), "1 2 3")
    samples = tuple(
        Sample(prompt_id, index, (5, 9, 3), (7, 8, 1), LOGPROBS, "stop", index or None, 0.5) for index in (0, 1)
    )
    return SampleGroup(prompt, samples)


def test_groups_come_back_with_the_same_bits(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    store.write(3, 1, [group(4), group(5)])
    assert RolloutStore(tmp_path / "rollouts").read(3, 1) == [group(4), group(5)]


def test_what_json_cannot_say_is_not_written(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    bad = dataclasses.replace(group(1).samples[0], rollout_logprobs=(float("nan"), -1.0, -1.0))
    with pytest.raises(ValueError, match="JSON"):
        store.write(0, 0, [SampleGroup(group(1).prompt, (bad,))])
    assert store.write_routes(0, 0, []) == []
    assert not list(tmp_path.iterdir())


def test_what_is_not_finished_is_not_there(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(3, 1, [group(4)])
    assert store.read(3, 0) is None
    assert store.read(2, 1) is None
    (tmp_path / "step_000003" / ".chunk_0000.json.host.1.tmp").write_text("[")
    assert store.read(3, 0) is None


@pytest.mark.parametrize("content", ["", "[{", '[{"prompt": 1}]', '[{"samples": []}]', "\0\0\0"])
def test_damage_is_named(tmp_path: Path, content: str) -> None:
    store = RolloutStore(tmp_path)
    store.write(0, 0, [group(1)])
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(content)
    with rejected("rollout-invalid", path):
        store.read(0, 0)


def test_only_steps_before_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for step in (8, 9, 10):
        store.write(step, 0, [group(step)])
    store.forget_before(10)
    assert [store.read(step, 0) for step in (8, 9)] == [None, None]
    assert store.read(10, 0) == [group(10)]


def test_a_step_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(2, 0, [group(1), group(2)])
    store.write(2, 1, [group(3)])
    assert store.read_step(2, 3) == [group(1), group(2), group(3)]
    for step, num_groups in ((2, 4), (3, 3)):
        with rejected("rollout-incomplete", "logging.keep_rollouts=true"):
            store.read_step(step, num_groups)


def routed(store: RolloutStore, step: int) -> SampleGroup:
    """Return a group whose samples' tokens went somewhere."""
    arrays = [np.full((5, 3, 2), number, np.uint8) for number in (1, 2)]
    routes = store.write_routes(step, 0, arrays)
    plain = group(4)
    samples = tuple(dataclasses.replace(s, routes=told) for s, told in zip(plain.samples, routes, strict=True))
    return SampleGroup(plain.prompt, samples)


def test_routes_come_back_also_where_the_folder_has_moved(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "one")
    written = routed(store, 3)
    store.write(3, 0, [written])
    assert store.read(3, 0) == [written]
    (tmp_path / "one").rename(tmp_path / "two")
    (found,) = RolloutStore(tmp_path / "two").read(3, 0) or []
    for number, sample in enumerate(found.samples, 1):
        assert sample.routes
        assert sample.routes.file == str(tmp_path / "two/step_000003/chunk_0000.routes")
        assert (sample.routes.shape, sample.routes.offset) == ((3, 5, 2), 30 * (number - 1))
        assert (np.memmap(sample.routes.file, np.uint8, "r", sample.routes.offset, (30,)) == number).all()


@pytest.mark.parametrize("spoil", ["flip", "cut", "remove"])
def test_routes_that_are_not_what_was_written_are_named(tmp_path: Path, spoil: str) -> None:
    store = RolloutStore(tmp_path)
    store.write(0, 0, [routed(store, 0)])
    (path,) = tmp_path.glob("*/*.routes")
    content = bytearray(path.read_bytes())
    content[40] ^= 4
    path.write_bytes(content if spoil == "flip" else content[:-1])
    if spoil == "remove":
        path.unlink()
    with rejected("rollout-invalid", ".routes"):
        store.read(0, 0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [('"uint8"', '"O"', "routes of type 'O'"), ("[3, 5, 2]", "[3, 6, 2]", "routes of 6 tokens for a sample of 6")],
)
def test_routes_that_are_something_else_are_not_opened(tmp_path: Path, old: str, new: str, said: str) -> None:
    store = RolloutStore(tmp_path)
    store.write(0, 0, [routed(store, 0)])
    (path,) = tmp_path.glob("*/*.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with rejected("rollout-invalid", said):
        store.read(0, 0)


def test_routes_go_with_their_step(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for step in (1, 2):
        store.write(step, 0, [routed(store, step)])
    store.forget_before(2)
    assert [path.parent.name for path in tmp_path.glob("*/*.routes")] == ["step_000002"]
