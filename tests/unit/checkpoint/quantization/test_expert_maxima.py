from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.rejections import rejected

from posttrain.checkpoint.quantization.expert_maxima import DOWN, GATE_UP, ExpertMaxima, PassState


def seen(seed: int) -> ExpertMaxima:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (3, 4), generator=generator)
    return ExpertMaxima(torch.rand(3, 4, 2, generator=generator) * (counts > 0)[..., None], counts)


def test_what_two_have_seen_is_the_larger_and_the_sum() -> None:
    one, other = seen(1), seen(2)
    both = one.merged(other)
    assert torch.equal(both.amax, torch.maximum(one.amax, other.amax))
    assert torch.equal(both.counts, one.counts + other.counts)
    nothing = ExpertMaxima.nothing(3, 4)
    assert torch.equal(one.merged(nothing).amax, one.amax)
    assert not nothing.by_module("model.")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_names_are_model_optimizers(prefix: str) -> None:
    found = ExpertMaxima.nothing(2, 2)
    found.amax[1, 0, GATE_UP], found.amax[1, 0, DOWN], found.counts[1, 0] = 3.0, 0.5, 7
    base = f"{prefix}layers.1.mlp.experts.0"
    assert {name: float(value) for name, value in found.by_module(prefix).items()} == {
        f"{base}.gate_proj.input_quantizer._amax": 3.0,
        f"{base}.up_proj.input_quantizer._amax": 3.0,
        f"{base}.down_proj.input_quantizer._amax": 0.5,
    }


def test_a_state_comes_back_with_its_bits(tmp_path: Path) -> None:
    state, found = PassState(tmp_path / "state" / "a.safetensors", "key"), seen(3)
    assert state.read() == (0, None)
    state.write(4, found)
    finished, again = state.read()
    assert finished == 4
    assert again is not None
    assert torch.equal(again.amax, found.amax)
    assert torch.equal(again.counts, found.counts)


def test_a_state_of_something_else_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    PassState(path, "key").write(4, seen(3))
    assert PassState(path, "other key").read() == (0, None)
    assert PassState(path, "key").read()[0] == 4


@pytest.mark.parametrize("damage", ["cut off", "empty", "another number", "no state"])
def test_a_damaged_state_is_not_believed(tmp_path: Path, damage: str) -> None:
    path, found = tmp_path / "a.safetensors", seen(3)
    PassState(path, "key").write(4, found)
    if damage == "another number":
        with safe_open(path, framework="pt") as file:
            said = file.metadata()
        found.counts[0, 0] += 1
        save_file({"amax": found.amax, "counts": found.counts}, path, metadata=said)
    elif damage == "no state":
        save_file({"other": found.amax}, path, metadata={"key": "key", "finished": "4"})
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut off" else b"")
    assert PassState(path, "key").read() == (0, None)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    found = seen(4)
    found.check_finite()
    found.amax[2, 3, 1] = value
    with rejected("values-not-finite", "layer 2, expert 3"):
        found.check_finite()
