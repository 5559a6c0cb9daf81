import dataclasses

import pytest
from tests.support.forked_programs import run_posttrain
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import ALL, QWEN3_5, TINY, TINY_MOONLIGHT, TINY_QWEN3_5, make_random_checkpoint

from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.commands.model import main
from posttrain.config.load import read_yaml
from posttrain.config.schema import Architecture, RopeScaling
from posttrain.config.vision import VisionTower
from posttrain.errors import ConfigError
from posttrain.store import write_json


def _made(folder, *words):
    return run_posttrain("model", *words, folder=folder)


@pytest.mark.parametrize("arch", [*ALL.values(), *QWEN3_5.values()], ids=[*ALL, *QWEN3_5])
def test_the_file_resolves_to_the_dimensions_of_the_checkpoint(tmp_path, arch, capsys):
    make_random_checkpoint(tmp_path / "hf", arch)
    main(tmp_path / "hf", "mine", tmp_path / "configs" / "models" / "mine.yaml")
    model = read_yaml(tmp_path / "configs" / "models" / "mine.yaml")["model"]
    assert model["source"] == {"kind": "folder", "folder": str(tmp_path / "hf")}
    rope = RopeScaling(**model["architecture"].pop("rope_scaling", {}))
    vision = VisionTower(**model["architecture"].pop("vision", {}))
    assert Architecture(**model["architecture"], rope_scaling=rope, vision=vision) == arch


def test_it_is_printed_and_an_existing_file_stays(tmp_path):
    make_random_checkpoint(tmp_path / "hf", TINY)
    done = _made(tmp_path, "hf")
    assert done.returncode == 0, done.stderr
    assert "  name: hf\n  source:\n    kind: folder\n    folder: hf\n" in done.stdout
    assert "hardware: cpu" in done.stdout
    (tmp_path / "mine.yaml").write_text("kept")
    done = _made(tmp_path, "hf", "mine", "--output", "mine.yaml")
    assert (done.returncode, (tmp_path / "mine.yaml").read_text()) == (1, "kept")


def test_what_is_not_taken_is_named_and_the_file_is_written(tmp_path, capsys):
    make_random_checkpoint(tmp_path / "hf", TINY)
    config = read_object(tmp_path / "hf" / "config.json")
    write_json(tmp_path / "hf" / "config.json", config | {"scoring_func": "softmax", "is_causal": False})
    with pytest.raises(ConfigError) as caught:
        main(tmp_path / "hf", "mine", tmp_path / "mine.yaml")
    assert {p.key for p in caught.value.problems} == {"config.json: scoring_func", "config.json: is_causal"}
    assert (tmp_path / "mine.yaml").exists()


def test_an_unknown_family_is_rejected_before_anything_is_written(tmp_path):
    make_random_checkpoint(tmp_path / "hf", TINY)
    write_json(tmp_path / "hf" / "config.json", read_object(tmp_path / "hf" / "config.json") | {"model_type": "llama"})
    with rejected("unknown-model-type", "'llama'"):
        main(tmp_path / "hf", "mine", tmp_path / "mine.yaml")
    assert not (tmp_path / "mine.yaml").exists()


def test_lost_mtp_layers_of_a_section_are_counted_as_the_weights_have_them(tmp_path, capsys):
    without = dataclasses.replace(TINY_QWEN3_5, num_nextn_predict_layers=0)
    make_random_checkpoint(tmp_path / "hf", without)
    config = read_object(tmp_path / "hf" / "config.json")
    config["text_config"]["mtp_num_hidden_layers"] = 1
    write_json(tmp_path / "hf" / "config.json", config)
    main(tmp_path / "hf", "mine", None)
    told = capsys.readouterr()
    assert "text_config/mtp_num_hidden_layers = 1: the weights have no such layer" in told.err
    assert "num_nextn_predict_layers" not in told.out


def test_a_checkpoint_of_the_text_alone_is_rejected_with_what_to_give(tmp_path):
    make_random_checkpoint(tmp_path / "hf", TINY_QWEN3_5)
    config = read_object(tmp_path / "hf" / "config.json")
    write_json(tmp_path / "hf" / "config.json", config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]})
    with rejected("unknown-model-type", "qwen3_5_text", "vision tower"):
        main(tmp_path / "hf", "mine", None)


def test_lost_mtp_layers_are_counted_as_the_weights_have_them(tmp_path, capsys):
    make_random_checkpoint(tmp_path / "hf", dataclasses.replace(TINY, num_nextn_predict_layers=0))
    config = read_object(tmp_path / "hf" / "config.json") | {"num_nextn_predict_layers": 1}
    write_json(tmp_path / "hf" / "config.json", config)
    main(tmp_path / "hf", "mine", None)
    told = capsys.readouterr()
    assert "num_nextn_predict_layers" not in told.out
    assert "num_nextn_predict_layers = 1: the weights have no such layer" in told.err


def test_a_config_without_weights_is_enough(tmp_path, capsys):
    make_random_checkpoint(tmp_path / "hf", TINY_MOONLIGHT)
    for path in (tmp_path / "hf").glob("model*"):
        path.unlink()
    main(tmp_path / "hf", None, None)
    told = capsys.readouterr()
    assert "model_type: deepseek_v3" in told.out
    assert "tensors were not compared" in told.err
