import dataclasses

import pytest

from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing.duration import Bandwidths, durations_seconds


def seconds_of(config, **rates):
    return durations_seconds(config, storage(config), dataclasses.replace(Bandwidths(), **rates))


def test_download_is_as_fast_as_the_line(resolved):
    config = resolved("glm5").config
    assert seconds_of(config)["download_hf_checkpoint"] == pytest.approx(1507.728, abs=0.001)
    assert seconds_of(config, hub=2e9)["download_hf_checkpoint"] == pytest.approx(753.864, abs=0.001)


def test_jobs_side_by_side_stop_helping_when_shared_storage_is_full(resolved):
    times = [
        seconds_of(resolved("glm5", set=f"convert.num_parts={parts}").config)["convert_hf_to_torch_dist"]
        for parts in (1, 2, 16, 64, 256)
    ]
    assert times[0] == pytest.approx(2 * times[1], rel=1e-6)
    assert times[0] == pytest.approx(16 * times[2], rel=1e-6)
    moved = 2 * storage(resolved("glm5").config).hf
    assert times[3] == times[4] == pytest.approx(moved / 20e9, abs=0.001)


def test_parts_that_wait_for_others_take_turns(resolved):
    config = resolved("glm5", set="convert.num_parts=16").config
    needed, rates = storage(config), Bandwidths()
    of_all, of_two, of_five = (
        durations_seconds(config, needed, rates, at_once)["convert_hf_to_torch_dist"] for at_once in (None, 2, 5)
    )
    assert of_two == pytest.approx(8 * of_all, abs=0.01)
    assert of_five == pytest.approx(4 * of_all, abs=0.01)


def test_staging_to_many_nodes_is_bound_by_shared_storage(resolved):
    few = resolved("glm5").config
    names = ",".join(f"n{index}" for index in range(32))
    many = resolved("glm5", set=f"site.node_names=[{names}]").config
    size = storage(few).node_local_bytes
    assert seconds_of(few)["stage_to_node_local"] == pytest.approx(size / 2e9, abs=0.001)
    assert seconds_of(many)["stage_to_node_local"] == pytest.approx(32 * size / 20e9, abs=0.001)


def test_what_is_not_there_takes_no_time(resolved):
    assert "download_hf_checkpoint" not in seconds_of(resolved("tiny").config)
    assert "quantize" not in seconds_of(resolved("glm5", set="rollout.fp8=false").config)
