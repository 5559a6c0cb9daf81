"""config/hardware against published tables."""

import math
from pathlib import Path

import pytest
from tests.support.published_sizes import COOKBOOK

from posttrain.plan.sizing.capacity import check_declared, check_typical
from posttrain.plan.sizing.engine import fits, serving_gib_per_gpu
from posttrain.plan.sizing.storage import storage

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
NAMES = sorted(path.stem for path in (CONFIG_DIR / "hardware").glob("*.yaml"))


@pytest.mark.parametrize(("name", "weights", "num_gpus"), COOKBOOK)
def test_the_cookbook_lists_what_fits_and_the_next_smaller_does_not(resolved, name, weights, num_gpus):
    arch = resolved("glm5").config.model.architecture
    hardware = resolved("tiny", hardware=name).config.hardware
    assert fits(arch, hardware, num_gpus, weights)
    assert not fits(arch, hardware, num_gpus // 2, weights)


@pytest.mark.parametrize(
    ("name", "weights", "num_gpus"),
    # seeds/vllm-glm5-b200-deployment.txt, and the card of the NVFP4 checkpoint.
    [("b200", "nvfp4", 4), ("rtx_pro_6000", "nvfp4", 8)],
)
def test_nvfp4_takes_the_gpus_that_its_users_name(resolved, name, weights, num_gpus):
    arch = resolved("glm5").config.model.architecture
    hardware = resolved("tiny", hardware=name).config.hardware
    assert fits(arch, hardware, num_gpus, weights)
    assert not fits(arch, hardware, num_gpus // 2, weights)


def test_gpus_that_attend_for_requests_of_their_own_hold_more(resolved):
    """Each has all of the attention, of an MI300X too much."""
    arch = resolved("glm5").config.model.architecture
    hardware = resolved("tiny", hardware="mi300x").config.hardware
    assert fits(arch, hardware, 8, "bf16")
    assert not fits(arch, hardware, 8, "bf16", "data_parallel")
    assert fits(arch, hardware, 16, "bf16", "data_parallel")


def test_what_an_engine_needs_by_hand(resolved):
    arch = resolved("glm5").config.model.architecture
    request = 32768 * 100_152 / 2**30
    assert serving_gib_per_gpu(arch, 8, "fp8") == pytest.approx(88.69 + request, abs=0.01)
    qwen = resolved("qwen3_4b").config.model.architecture
    # On 16 GPUs, 8 key-value heads stand twice; so do their projections.
    cached = 32768 * 36 * 2 * 128 * 2
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    cut = 151_936 * 2560 + 36 * (2 * 32 * 128 * 2560 + 3 * 2560 * 9728)
    key_value = 36 * 2 * 8 * 128 * 2560
    weights = 2 * (norms + cut // 16 + key_value // 8)
    assert serving_gib_per_gpu(qwen, 16, "bf16") * 2**30 == pytest.approx(weights + cached, abs=1)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_a_file_fit_together(resolved, name):
    hardware = resolved("tiny", hardware=name).config.hardware
    assert hardware.name == name
    assert hardware.bf16_tflops <= hardware.fp8_tflops <= 2.01 * hardware.bf16_tflops
    assert hardware.gpu_link_gb_per_s < hardware.hbm_gb_per_s
    assert hardware.local_disk_gb_per_s < hardware.local_disk_gb
    assert hardware.linked_gpus % hardware.gpus_per_node == 0
    assert not set(hardware.formats) & set(hardware.emulated_formats)
    assert hardware.trainer_deepep != bool(hardware.trainer_deepep_reason)
    assert resolved("tiny", hardware=name).config.trainer.deepep == (hardware.trainer_deepep)


def test_gb300_has_four_gpus_and_no_deepep_in_the_trainer(resolved):
    config = resolved("tiny", hardware="gb300").config
    assert (config.hardware.gpus_per_node, config.hardware.linked_gpus) == (4, 72)
    assert (config.hardware.deepep, config.hardware.trainer_deepep, config.trainer.deepep) == (True, False, False)


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("h100", 81_559), ("h200", 143_771), ("b200", 183_359), ("gb300", 284_208), ("rtx_pro_6000", 97_887)],
)
def test_memory_is_what_the_driver_reports_and_no_more(resolved, name, mebibytes):
    stated = resolved("tiny", hardware=name).config.hardware.memory_gib_per_gpu
    assert stated == math.floor(mebibytes / 1024 * 10) / 10


def test_kernels_are_those_that_the_cookbook_names(resolved):
    b200, mi300x, h200 = (resolved("tiny", hardware=n).config.hardware.kernels for n in ("b200", "mi300x", "h200"))
    assert (b200.dsa_prefill, b200.dsa_decode, b200.allreduce_fusion) == ("trtllm", "trtllm", True)
    assert (mi300x.dsa_prefill, mi300x.dsa_decode, mi300x.speculative) == ("tilelang", "tilelang", False)
    assert (mi300x.chunked_prefill_tokens, mi300x.watchdog_seconds) == (131_072, 1200)
    assert h200 == type(h200)(), "no other hardware needs switches"
    mi325x, mi355x = (resolved("tiny", hardware=name).config.hardware.kernels for name in ("mi325x", "mi355x"))
    assert mi300x == mi325x == mi355x


def test_declared_capacities_are_checked(resolved):
    undeclared = resolved("glm5").config
    needed = storage(undeclared)
    assert not list(check_declared(undeclared, needed, 5000.0))
    tight = "site.shared_disk_gb=30000 site.local_disk_gb=1500 site.host_memory_gib=1024"
    config = resolved("glm5", set=tight).config
    problems = {problem.key: problem for problem in check_declared(config, needed, 1025.0)}
    assert list(problems) == ["site.shared_disk_gb", "site.local_disk_gb", "site.host_memory_gib"]
    told = {
        "site.shared_disk_gb": (
            "30,000 GB",
            f"{needed.shared_bytes / 10**9:,.1f} GB",
            "lower trainer.keep_checkpoints",
        ),
        "site.local_disk_gb": ("1,500 GB", f"{needed.node_local_bytes / 10**9:,.1f} GB", "use nodes with larger disks"),
        "site.host_memory_gib": ("1,024 GiB", "1,025.0 GiB", "use more nodes"),
    }
    for key, (value, least, remedy) in told.items():
        assert problems[key].value == value
        assert problems[key].allowed == f"at least {least}, which the plan needs"
        assert problems[key].remedy.startswith(remedy)
    least = resolved("glm5", set="site.host_memory_gib=1").config
    assert [problem.value for problem in check_declared(least, needed, 1025.0)] == ["1 GiB"], "0 alone declares nothing"
    ample = resolved("glm5", set="site.shared_disk_gb=40000 site.local_disk_gb=3000 site.host_memory_gib=1024").config
    assert not list(check_declared(ample, needed, 1024.0))


def test_what_such_nodes_usually_lack_is_found_unless_the_site_declares_it(resolved):
    config = resolved("glm5").config
    needed = storage(config)
    assert not list(check_typical(config, needed, 2048.0))
    (problem,) = check_typical(config, needed, 2048.1)
    assert (problem.key, problem.value) == ("hardware.host_memory_gib", "2,048 GiB, typical of h200")
    assert problem.allowed == "at least 2,048.1 GiB, which the plan needs"
    assert problem.remedy.startswith("declare what your nodes have with site.host_memory_gib")
    assert not list(check_typical(resolved("glm5", set="site.host_memory_gib=4096").config, needed, 2048.1))
    small = resolved("glm5", set="hardware.local_disk_gb=1500").config
    assert [problem.key for problem in check_typical(small, needed, 1.0)] == ["hardware.local_disk_gb"]
