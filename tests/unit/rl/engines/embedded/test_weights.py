import pytest
import torch
from tests.support.rejections import rejected
from tests.unit.rl.engines.conftest import ARCHITECTURES, strong_tensors, write_checkpoint

from posttrain.checkpoint.quantization.fp8 import dequantize_block, quantize_named
from posttrain.rl.engines.checksums import tensor_checksum
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.weights import WeightError, views_by_hub_name

MTP = "model.layers.3."
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


def test_fused_experts_under_their_hub_names():
    gate_up = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)  # E = 2, F = 2, H = 3
    down = torch.arange(2 * 3 * 2.0).reshape(2, 3, 2)
    views = views_by_hub_name({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down, "norm.weight": down})
    assert views["m.experts.1.gate_proj.weight"].tolist() == [[12, 13, 14], [15, 16, 17]]
    assert views["m.experts.1.up_proj.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]
    assert views["m.experts.0.down_proj.weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(views) == 7
    views["m.experts.0.up_proj.weight"].fill_(-1)
    assert gate_up[0, 2:].eq(-1).all()


@pytest.fixture
def loaded(checkpoint):
    return load_model(checkpoint, torch.float32)


def test_a_checkpoint_is_served_as_it_is_and_then_an_update(model_type, tmp_path):
    mtp = f"model.layers.{ARCHITECTURES[model_type].num_hidden_layers}."
    others, tensors = (mtp, "mtp.", "model.visual."), strong_tensors(model_type, seed=4)
    loaded = load_model(write_checkpoint(tmp_path / "hf", model_type, tensors), torch.float32)
    for version in (4, 5):
        tensors = strong_tensors(model_type, seed=version)
        expected = {name: tensor_checksum(t.float()) for name, t in tensors.items() if not name.startswith(others)}
        if version == 5:
            update = loaded.weights.begin_update()
            update.add(tensors.items())
            loaded.weights.serve(update, None)
        assert loaded.weights.checksums() == expected


@pytest.mark.parametrize(
    ("family", "embedding"),
    [("qwen3", "model.embed_tokens.weight"), ("qwen3_5", "model.language_model.embed_tokens.weight")],
)
def test_a_tied_output_matrix_follows_the_embedding(tmp_path, family, embedding):
    """Written out in the checkpoint or not; after an update, too."""
    tensors = strong_tensors(family, seed=4)
    written = tensors | {"lm_head.weight": tensors[embedding].clone()}
    loaded = load_model(write_checkpoint(tmp_path / "hf", family, written), torch.float32)
    new = strong_tensors(family, seed=5)
    update = loaded.weights.begin_update()
    update.add(new.items())
    loaded.weights.serve(update, None)
    assert "lm_head.weight" not in loaded.weights.checksums()
    assert torch.equal(loaded.model.lm_head.weight, new[embedding].float())
    assert torch.equal(loaded.model.model.embed_tokens.weight, new[embedding].float())


def test_an_update_replaces_everything_at_once(loaded, new_tensors):
    before = loaded.weights.checksums()
    update = loaded.weights.begin_update()
    for name, tensor in new_tensors.items():
        update.add([(name, tensor)])
    assert loaded.weights.checksums() == before
    loaded.weights.serve(update, "7")
    expected = {n: tensor_checksum(t.float()) for n, t in new_tensors.items() if not n.startswith(MTP)}
    assert loaded.weights.checksums() == expected
    assert loaded.weights.version == "7"
    assert update.num_skipped == sum(name.startswith(MTP) for name in new_tensors)


def test_a_quantised_update_is_served_as_code_times_scale(loaded, new_tensors):
    update = loaded.weights.begin_update()
    for name, tensor in new_tensors.items():
        update.add(quantize_named(name, tensor))
    loaded.weights.serve(update, None)
    expected = dequantize_block(*(value for _, value in quantize_named(DOWN, new_tensors[DOWN])))
    assert loaded.weights.checksums()[DOWN] == tensor_checksum(expected)


def test_updates_follow_each_other(loaded, tensors, new_tensors):
    first = loaded.weights.checksums()
    for values in (new_tensors, tensors):
        update = loaded.weights.begin_update()
        update.add(values.items())
        loaded.weights.serve(update, None)
    assert loaded.weights.checksums() == first


def test_half_an_update_is_never_served(loaded, new_tensors):
    before = loaded.weights.checksums()
    update = loaded.weights.begin_update()
    update.add(list(new_tensors.items())[:10])
    with pytest.raises(WeightError, match=r"72 of 82 tensors are missing: lm_head\.weight.* and 67 more"):
        loaded.weights.serve(update, "7")
    assert loaded.weights.checksums() == before
    assert loaded.weights.version is None


CODES, SCALE = torch.zeros(64, 32).to(torch.float8_e4m3fn), torch.ones(1, 1)


@pytest.mark.parametrize(
    ("bucket", "said"),
    [
        (
            {"model.layers.0.mlp.gate.weight": torch.zeros(4, 64)},
            "mlp.gate.weight: the model has no such tensor",
        ),
        ({"model.layers.4.input_layernorm.weight": torch.zeros(64)}, "no such tensor"),
        ({DOWN: torch.zeros(32, 64)}, r"shape \(32, 64\), the model's is \(64, 32\)"),
        ({"model.norm.weight": torch.zeros(1)}, r"shape \(1,\), the model's is \(64,\)"),
        ({DOWN: CODES}, f"{DOWN}_scale_inv is not beside it"),
        ({f"{DOWN}_scale_inv": SCALE}, f"came without {DOWN}"),
        ({DOWN: CODES, f"{DOWN}_scale_inv": torch.ones(2, 1)}, r"expected \(1, 1\)"),
    ],
)
def test_a_tensor_that_does_not_fit_ends_the_update(loaded, new_tensors, bucket, said):
    update = loaded.weights.begin_update()
    with pytest.raises(WeightError, match=said):
        update.add(bucket.items())
    update.add(new_tensors.items())
    with pytest.raises(WeightError, match="failed before"):
        loaded.weights.serve(update, None)


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "data"),
    [
        (lambda tensors: without(tensors, DOWN), ["1 of 82 tensors", DOWN]),
        (lambda tensors: {**tensors, "model.extra.weight": torch.zeros(2)}, ["model.extra.weight"]),
        (lambda tensors: {**tensors, DOWN: torch.zeros(3, 3)}, ["(3, 3)"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, tensors, change, data):
    folder = write_checkpoint(tmp_path / "hf", "glm_moe_dsa", change(tensors))
    with rejected("model-not-loadable", *data):
        load_model(folder, torch.float32)


def test_an_architecture_that_is_not_served_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with rejected("family-not-served", "'llama'", "glm_moe_dsa, deepseek_v3, "):
        load_model(tmp_path, torch.float32)


def test_a_folder_without_config_is_refused(tmp_path):
    with rejected("model-not-loadable", "config.json"):
        load_model(tmp_path, torch.float32)


def test_facts_of_the_model(checkpoint, loaded):
    assert (loaded.eos_token_ids, loaded.vocab_size, loaded.max_positions) == (frozenset({1}), 64, 256)
