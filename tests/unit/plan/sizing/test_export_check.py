"""How an export is checked follows from a node's memory."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.plan.job_needs import job_needs
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.export_check import check_export_memory, export_check_bytes, export_check_way
from posttrain.plan.sizing.model_size import Weight, decoder_weights, edge_weights, model_weights

CONFIG = Path(__file__).parents[4] / "config"


def config_of(model: str, **export: str) -> Config:
    given = {"model": model, "site": "example_slurm" if model != "tiny" else "local"}
    config = resolve(given, CONFIG).config
    return dataclasses.replace(config, export=dataclasses.replace(config.export, **export))


def test_glm5_goes_a_layer_at_a_time_and_the_tiny_model_whole() -> None:
    large, tiny = config_of("glm5"), config_of("tiny")
    assert (export_check_way(large), export_check_way(tiny)) == ("layers", "whole")
    # Two MoE layers of 256 experts, embedding and output matrix, in FP32.
    expert = 3 * 6144 * 2048 * 4
    assert 2 * 256 * expert + 2 * 154_880 * 6144 * 4 < export_check_bytes(large) < 95e9
    assert job_needs(large, "check_export").memory_bytes == export_check_bytes(large)


def test_one_that_is_off_takes_nothing() -> None:
    config = config_of("glm5", check="off")
    assert (export_check_way(config), export_check_bytes(config)) == ("off", 0)
    assert list(check_export_memory(config)) == []


@pytest.mark.parametrize(("check", "remedy"), [("whole", "set export.check=auto"), ("layers", "set export.check=off")])
def test_what_a_node_does_not_hold_is_rejected(check: str, remedy: str) -> None:
    config = config_of("glm5", check=check)
    if check == "layers":
        assert list(check_export_memory(config)) == []
        config = dataclasses.replace(config, site=dataclasses.replace(config.site, host_memory_gib=64))
    (problem,) = check_export_memory(config)
    assert problem.key == "export.check"
    assert problem.value.startswith(f"{check} takes ")
    assert problem.allowed.startswith("what a node's host memory of ")
    assert problem.remedy.startswith(remedy)


def numbers_of(weights: Iterable[Weight]) -> int:
    return sum(weight.num_elements for weight in weights)


def with_memory(config: Config, num_bytes: float) -> Config:
    return dataclasses.replace(config, site=dataclasses.replace(config.site, host_memory_gib=num_bytes / 2**30))


def test_what_a_check_takes_by_hand() -> None:
    """In FP32, with a layer or two in the making and 2 GiB for all else; whole in four fifths of a node at most."""
    whole, layers = config_of("tiny", check="whole"), config_of("tiny", check="layers")
    arch = whole.model.architecture
    largest = max(map(numbers_of, decoder_weights(arch)))
    edges = sum(map(numbers_of, edge_weights(arch)))
    assert export_check_bytes(whole) == 4 * (numbers_of(model_weights(arch)) + largest) + 2**31
    assert export_check_bytes(layers) == 4 * (edges + 2 * largest) + 2**31
    room = export_check_bytes(whole) / 0.8
    tiny = config_of("tiny")
    assert [export_check_way(with_memory(tiny, room + more)) for more in (1, -1)] == ["whole", "layers"]
    assert not list(check_export_memory(with_memory(whole, export_check_bytes(whole))))
    assert list(check_export_memory(with_memory(whole, export_check_bytes(whole) - 1)))
