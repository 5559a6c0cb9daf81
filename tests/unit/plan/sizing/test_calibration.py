from __future__ import annotations

from pathlib import Path

from posttrain.plan.job_needs import job_needs
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.calibration import calibration_gib, describe_calibration
from posttrain.plan.sizing.memory import GIB, stage_memory
from posttrain.plan.sizing.memory_phases import phase_memory

CONFIG_DIR = Path(__file__).parents[4] / "config"


def config(changes: str = "", **words: object):
    return resolve({"site": "local", **({"set": changes} if changes else {}), **words}, CONFIG_DIR).config


def test_glm5_calibrates_on_the_nodes_that_train_it_with_less_than_training_takes() -> None:
    glm5 = config(model="glm5", nodes=16)
    needs = job_needs(glm5, "calibrate")
    assert (needs.nodes, needs.gpus, needs.time_limit) == (16, 128, "")
    weights = max(stage.weights_bytes for stage in stage_memory(glm5)) / GIB
    needed = calibration_gib(glm5)
    assert weights < needed < weights + 20
    train = max(item.gpu_gib for item in phase_memory(glm5) if item.phase == "train")
    assert needed < train
    assert f"{needed:.1f} GiB per rank" in describe_calibration(glm5)
    assert "512 coding + 512 broad + 64 deep" in describe_calibration(glm5)


def test_nodes_that_only_engines_have_and_spare_ones_do_not_calibrate() -> None:
    slurm = config("site.slurm.spare_nodes=2", model="glm5", nodes=16, site="example_slurm")
    assert job_needs(slurm, "calibrate").nodes == 16
    apart = config("engine.own_nodes=1 engine.num_engines=1", model="qwen3_30b_a3b", nodes=3)
    assert job_needs(apart, "calibrate").nodes == 2
    assert calibration_gib(apart) > 0


def test_a_machine_without_gpus() -> None:
    tiny = config(model="tiny")
    assert job_needs(tiny, "calibrate").gpus == 0
    assert 0 < calibration_gib(tiny) < 2
