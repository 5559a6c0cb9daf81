"""Finished sample groups on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import CheckpointError
from posttrain.rollout.persisted import RolloutStore
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
    with pytest.raises(CheckpointError, match=f"{path}: not a rollout"):
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
        with pytest.raises(CheckpointError, match=r"groups are there; logging\.keep_rollouts=true"):
            store.read_step(step, num_groups)
