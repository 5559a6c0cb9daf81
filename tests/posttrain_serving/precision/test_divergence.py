"""KL of quantised weights: layer by layer against whole models of transformers, and numpy's arithmetic."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import ALL, QWEN3_5, TINY, make_random_checkpoint

from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization.dequantize import QuantizedCheckpoint
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.rl.engines.embedded.model import load_model
from posttrain_serving.precision.divergence import (
    CheckpointLogprobs,
    Likeliest,
    Sample,
    divergence,
    truncated_divergence,
)

# Experts in whole groups of every format.
WIDE = dataclasses.replace(TINY, hidden_size=256, moe_intermediate_size=128, intermediate_size=160)
SAMPLES = [
    Sample((5, 9, 33, 12, 60, 2, 8, 40, 17, 3, 21, 22, 23), 4),
    Sample((7, 7, 1), 1),
    Sample((50, 4, 4, 19, 30, 31, 2, 6, 41), 8),
]
FORMATS = {
    "fp8": {"format": "fp8", "strategy": "block", "scale": "fp32"},
    "channel": {"format": "fp8", "strategy": "channel", "scale": "fp32"},
    "nvfp4": {"format": "nvfp4"},
    "int4": {"format": "int4"},
}


def whole_logits(model):
    """Of each sample by itself, the rows that predict its response."""
    with torch.inference_mode():
        found = [
            model(input_ids=torch.tensor([one.tokens])).logits[0, one.num_prompt_tokens - 1 : -1] for one in SAMPLES
        ]
    return torch.cat(found)


@pytest.mark.parametrize("arch", [*ALL.values(), *QWEN3_5.values()], ids=[*ALL, *QWEN3_5])
def test_layer_by_layer_is_the_whole_model(tmp_path, arch):
    make_random_checkpoint(tmp_path / "hf", arch)
    spoken = CheckpointLogprobs(tmp_path / "hf", SAMPLES)
    expected = torch.log_softmax(whole_logits(load_model(tmp_path / "hf", torch.float32).model), dim=-1)
    found = spoken.logprobs(slice(None))
    assert found.shape == (9 + 2 + 1, arch.vocab_size)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(folder, WIDE)
    return folder


def recoded(source, settings, folder):
    make_folder(RecodedFolder(Quantization(source, settings), "s1"), folder)
    return folder


def model_of_numbers(source, quantised, folder):
    """The whole model with what codes stand for, by a checkpoint of plain FP32."""
    values = QuantizedCheckpoint(quantised)
    tensors = {name: values.tensor(name).float().contiguous() for name in values.names}
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return load_model(folder, torch.float32).model


@pytest.mark.parametrize("name", FORMATS)
def test_divergence_is_numpys_over_whole_models(tmp_path, source, name):
    quantised = recoded(source, FORMATS[name], tmp_path / "quantised")
    found = divergence(CheckpointLogprobs(source, SAMPLES), CheckpointLogprobs(quantised, SAMPLES))
    whole = [load_model(source, torch.float32).model, model_of_numbers(source, quantised, tmp_path / "numbers")]
    p, q = (torch.log_softmax(whole_logits(model).double(), dim=-1).numpy() for model in whole)
    nats = (np.exp(p) * (p - q)).sum(axis=-1)
    assert found.mean == pytest.approx(nats.mean(), rel=1e-3)
    assert found.largest == pytest.approx(nats.max(), rel=1e-3)
    assert found.p99 == found.largest, "of twelve tokens"
    assert found.same_first == (p.argmax(axis=-1) == q.argmax(axis=-1)).mean()
    assert found.num_tokens == 12


def test_a_checkpoint_is_not_far_from_itself(source):
    spoken = CheckpointLogprobs(source, SAMPLES)
    found = divergence(spoken, spoken)
    assert (found.mean, found.largest, found.same_first) == (0.0, 0.0, 1.0)


def test_four_bits_are_farther_than_eight(tmp_path, source):
    original = CheckpointLogprobs(source, SAMPLES)
    eight, four = (
        CheckpointLogprobs(recoded(source, FORMATS[name], tmp_path / name), SAMPLES) for name in ("fp8", "nvfp4")
    )
    nats = [divergence(original, other).mean for other in (eight, four)]
    assert nats[1] > nats[0] > 0


def test_a_layer_is_in_memory_at_a_time(source, monkeypatch):
    """Before a layer is filled, those behind it are without memory again."""
    filled = []
    fill = CheckpointLogprobs._fill

    def watch(self, module, prefix):
        filled.append(module)
        fill(self, module, prefix)
        held = [
            one for one in filled if prefix.startswith("model.layers") and next(one.parameters()).device.type == "cpu"
        ]
        # Embedding and last norm stay.
        assert len(held) <= 3

    monkeypatch.setattr(CheckpointLogprobs, "_fill", watch)
    CheckpointLogprobs(source, SAMPLES)
    assert len(filled) == 2 + WIDE.num_hidden_layers


@pytest.mark.parametrize(("spoil", "code"), [("missing", "no-such-tensor"), ("shape", "tensor-shape")])
def test_weights_that_do_not_fit_are_named(tmp_path, spoil, code):
    make_random_checkpoint(tmp_path, TINY, num_shards=1)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors, name = load_file(shard), "model.layers.1.mlp.experts.2.up_proj.weight"
    if spoil == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with rejected(code, name, *(["31, 64", "32, 64"] if spoil == "shape" else [])):
        CheckpointLogprobs(tmp_path, SAMPLES)


def likeliest(logprobs, count):
    values, tokens = logprobs.topk(count, dim=-1)
    return Likeliest(tokens.int(), values.float())


def test_what_engines_tell_bounds_the_whole_from_below():
    """By a loop over places and tokens; with all tokens it is the whole."""
    generator = torch.Generator().manual_seed(5)
    ours = torch.log_softmax(3 * torch.randn(40, 30, generator=generator), dim=-1)
    theirs = torch.log_softmax(ours + 0.5 * torch.randn(40, 30, generator=generator), dim=-1)
    whole = (ours.exp() * (ours - theirs)).sum(-1)
    before = 0.0
    for count in (2, 5, 12, 30):
        told, others = likeliest(ours, count), likeliest(theirs, count)
        expected, seen = [], []
        for place in range(40):
            both = set(told.tokens[place].tolist()) & set(others.tokens[place].tolist())
            p, q = (np.exp(each[place].double().numpy()) for each in (ours, theirs))
            rest = [1 - sum(each[token] for token in both) for each in (p, q)]
            nats = sum(p[token] * np.log(p[token] / q[token]) for token in both)
            expected.append(nats + (rest[0] * np.log(rest[0] / rest[1]) if count < 30 else 0))
            seen.append(1 - rest[0])
        found = truncated_divergence(told, others)
        assert found.mean == pytest.approx(np.mean(expected), rel=1e-4)
        assert found.largest == pytest.approx(np.max(expected), rel=1e-4)
        assert found.covered == pytest.approx(np.mean(seen), abs=1e-5)
        assert before < found.mean <= whole.mean() * (1 + 1e-4)
        before = found.mean
    assert before == pytest.approx(float(whole.mean()), rel=1e-4)
    assert found.same_first == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))


def test_engines_that_say_the_same_are_not_apart():
    told = likeliest(torch.log_softmax(torch.randn(9, 30, generator=torch.Generator().manual_seed(1)), dim=-1), 20)
    found = truncated_divergence(told, told)
    assert (found.mean, found.largest, found.same_first, found.num_tokens) == (0.0, 0.0, 1.0, 9)
    assert 0 < found.covered < 1


def test_tokens_that_one_engine_alone_tells_are_one_event():
    ours = Likeliest(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.3]]).log())
    theirs = Likeliest(torch.tensor([[1, 3]]), torch.tensor([[0.5, 0.4]]).log())
    assert truncated_divergence(ours, theirs).mean == pytest.approx(0.6 * np.log(0.6 / 0.5) + 0.4 * np.log(0.4 / 0.5))
