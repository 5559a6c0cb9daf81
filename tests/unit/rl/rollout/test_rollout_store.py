"""Finished groups on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.support.rejections import rejected

from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Prompt, Trajectory, TrajectoryGroup, VersionSpan

# Numbers that lose bits when they are written with few digits.
LOGPROBS = (-0.1, -1.0000000000000002, -5e-324)


def group(prompt_id: int) -> TrajectoryGroup:
    prompt = Prompt(prompt_id, ({"role": "user", "content": "sort 3 1 2 – bitte"},), "1 2 3")
    samples = tuple(
        Trajectory.of_response(
            (5, 9, 3), (7, 8, 1), LOGPROBS, index or None, prompt_id=prompt_id, sample_index=index, reward=0.5
        )
        for index in (0, 1)
    )
    return TrajectoryGroup(prompt, samples)


def test_groups_come_back_with_the_same_bits(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    store.write(3, 1, [group(4), group(5)])
    assert RolloutStore(tmp_path / "rollouts").read(3, 1) == [group(4), group(5)]


# Of a run that began before a trajectory could have several sampled stretches; shortened.
OLD_CHUNK = """[{"prompt": {"prompt_id": 7, "messages": [{"role": "user", "content": "sort 3 1 2"}], "label": "1 2 3"},
"samples": [
{"prompt_id": 7, "sample_index": 0, "prompt_tokens": [5, 9, 3], "response_tokens": [7, 1],
"rollout_logprobs": [-0.1, -1.0000000000000002], "finish_reason": "stop", "weight_version": 4, "reward": 1.0,
"scores": {"exact_match": 1.0}, "parts": {"exact_match/length": 2.0}, "failure": "",
"routes": {"file": "chunk_0000.routes", "offset": 0, "shape": [1, 4, 2], "dtype": "uint8", "digest": "DIGEST"}},
{"prompt_id": 7, "sample_index": 1, "prompt_tokens": [5, 9, 3], "response_tokens": [8],
"rollout_logprobs": [-0.5], "finish_reason": "length", "weight_version": null, "reward": null,
"scores": {}, "parts": {}, "failure": "late"},
{"prompt_id": 7, "sample_index": 2, "prompt_tokens": [5], "response_tokens": [8],
"rollout_logprobs": [], "finish_reason": "stop", "weight_version": null, "reward": 0.0,
"scores": {}, "parts": {}, "failure": ""}]}]"""


def test_groups_of_older_runs_are_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    ((routes,),) = store.write_routes(0, 0, [[np.ones((4, 1, 2), np.uint8)]])
    (tmp_path / "step_000000/chunk_0000.json").write_text(OLD_CHUNK.replace("DIGEST", routes.digest))
    ((found,)) = store.read(0, 0) or []
    first = Trajectory(
        *(7, 0, (5, 9, 3, 7, 1), (0, 0, 0, 1, 1), (-0.1, -1.0000000000000002), (VersionSpan(4, 2),), "stop", 1.0),
        *({"exact_match": 1.0}, {"exact_match/length": 2.0}, "", (routes,)),
    )
    second = Trajectory(
        7, 1, (5, 9, 3, 8), (0, 0, 0, 1), (-0.5,), (VersionSpan(None, 1),), "length", None, failure="late"
    )
    third = Trajectory(7, 2, (5, 8), (0, 1), (), (), "stop", 0.0)
    assert found == TrajectoryGroup(found.prompt, (first, second, third))
    assert found.prompt == Prompt(7, ({"role": "user", "content": "sort 3 1 2"},), "1 2 3")
    store.write(0, 1, [found])
    assert store.read(0, 1) == [found]


def test_what_json_cannot_say_is_not_written(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    bad = dataclasses.replace(group(1).trajectories[0], logprobs=(float("nan"), -1.0, -1.0))
    with pytest.raises(ValueError, match="JSON"):
        store.write(0, 0, [TrajectoryGroup(group(1).prompt, (bad,))])
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


def routed(store: RolloutStore, step: int) -> TrajectoryGroup:
    """Return a group whose samples' tokens went somewhere."""
    arrays = [[np.full((5, 3, 2), number, np.uint8)] for number in (1, 2)]
    routes = store.write_routes(step, 0, arrays)
    plain = group(4)
    samples = tuple(dataclasses.replace(s, routes=told) for s, told in zip(plain.trajectories, routes, strict=True))
    return TrajectoryGroup(plain.prompt, samples)


def test_routes_come_back_also_where_the_folder_has_moved(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "one")
    written = routed(store, 3)
    store.write(3, 0, [written])
    assert store.read(3, 0) == [written]
    (tmp_path / "one").rename(tmp_path / "two")
    (found,) = RolloutStore(tmp_path / "two").read(3, 0) or []
    for number, sample in enumerate(found.trajectories, 1):
        (routes,) = sample.routes
        assert routes.file == str(tmp_path / "two/step_000003/chunk_0000.routes")
        assert (routes.shape, routes.offset) == ((3, 5, 2), 30 * (number - 1))
        assert (np.memmap(routes.file, np.uint8, "r", routes.offset, (30,)) == number).all()


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
    [('"uint8"', '"O"', "routes of type 'O'"), ("[3, 5, 2]", "[3, 6, 2]", "routes of (6,)")],
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
