"""Settings that break each other are refused by the plan, and looked for in what the shell would hand on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.config.load import Resolved
from posttrain.plan.flags.env_conflicts import BAD_PAIRS, TRAINER, environments, find_env_conflicts
from posttrain.plan.flags.environment import ALLOCATOR_VARIABLES, started_with, trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.problems import find_problems

Resolve = Callable[..., Resolved]
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
QWEN = {"model": "qwen3_4b", "hardware": "h100"}
# What is asked for, the variable that the problem names, and what is the nearest that is right.
CASES = {
    "saver in ranks whose segments expand": (
        {"model": "glm5", "set": f"site.trainer_environment=[{EXPANDABLE},TMS_INIT_ENABLE=1]"},
        "TMS_INIT_ENABLE=1",
        {"model": "glm5", "set": "site.trainer_environment=[TMS_INIT_ENABLE=1]"},
    ),
    "segments that expand in engines that sleep": (
        {"model": "glm5", "set": f"site.engine_environment=[{EXPANDABLE}]"},
        EXPANDABLE,
        {"model": "glm5", "set": "site.engine_environment=[PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64]"},
    ),
    "the same by the newer name": (
        {"model": "glm5", "set": "site.engine_environment=['PYTORCH_ALLOC_CONF=expandable_segments:TRUE']"},
        "PYTORCH_ALLOC_CONF",
        {"model": "glm5", "set": "site.engine_environment=[PYTORCH_ALLOC_CONF=expandable_segments:False]"},
    ),
    "registered tensors": (
        {"model": "glm5", "set": "site.trainer_environment=[TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1]"},
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1",
        {"model": "glm5", "set": "site.trainer_environment=[TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=0]"},
    ),
    "work queues": (
        {"model": "glm5", "set": "site.trainer_environment=[CUDA_DEVICE_MAX_CONNECTIONS=32]"},
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
        {"model": "glm5", "hardware": "b200", "set": "site.trainer_environment=[CUDA_DEVICE_MAX_CONNECTIONS=32]"},
    ),
    "cuMem where NVLink joins nodes": (
        {"model": "glm5", "hardware": "gb300", "nodes": 18, "set": "site.trainer_environment=[NCCL_CUMEM_ENABLE=0]"},
        "NCCL_CUMEM_ENABLE=0",
        {"model": "glm5", "set": "site.trainer_environment=[NCCL_CUMEM_ENABLE=0]"},
    ),
    "no transport for DeepEP": (
        {"model": "glm5", "set": "site.trainer_environment=[NVSHMEM_REMOTE_TRANSPORT=none]"},
        "NVSHMEM_REMOTE_TRANSPORT=none",
        {"model": "glm5", "set": "site.trainer_environment=[NVSHMEM_REMOTE_TRANSPORT=ibrc]"},
    ),
    "no fast attention": (
        {**QWEN, "set": "site.trainer_environment=[NVTE_FLASH_ATTN=0,NVTE_FUSED_ATTN=0]"},
        "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0",
        {**QWEN, "set": "site.trainer_environment=[NVTE_FLASH_ATTN=0]"},
    ),
    "a loop over several nodes": (
        {"model": "glm5", "set": "site.engine_environment=[NCCL_SOCKET_IFNAME=lo]"},
        "NCCL_SOCKET_IFNAME=lo",
        {"model": "glm5", "set": "site.engine_environment=[NCCL_SOCKET_IFNAME=ib0]"},
    ),
    "no watchdog": (
        {"model": "glm5", "set": "site.trainer_environment=[TORCH_NCCL_BLOCKING_WAIT=1]"},
        "TORCH_NCCL_BLOCKING_WAIT=1",
        {"model": "glm5", "set": "site.trainer_environment=[TORCH_NCCL_BLOCKING_WAIT=0]"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_pair_is_refused_and_its_neighbour_is_not(resolved: Resolve, name: str) -> None:
    wrong, named, right = CASES[name]
    (problem,) = find_env_conflicts(resolved(**wrong).config)
    assert named in problem.value
    assert problem.key == f"site.{'engine' if 'engine_env' in wrong['set'] else 'trainer'}_environment"
    assert problem in find_problems(resolved(**wrong).config)
    assert find_env_conflicts(resolved(**right).config) == []


def test_every_row_has_a_case_and_a_source() -> None:
    assert len(BAD_PAIRS) == len(CASES) - 1, "one of them is tried by two names"
    assert all(row.source and row.allowed for row in BAD_PAIRS)


def test_what_the_shell_hands_on_is_looked_at_too(resolved: Resolve) -> None:
    config = resolved("glm5").config
    assert find_env_conflicts(config, {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}) == []
    (problem,) = find_env_conflicts(config, {"NVSHMEM_REMOTE_TRANSPORT": "none"})
    assert problem.value == "NVSHMEM_REMOTE_TRANSPORT=none in trainer processes"
    assert find_env_conflicts(resolved("tiny").config, {"NVSHMEM_REMOTE_TRANSPORT": "none"}) == [], "there are no GPUs"


@pytest.mark.parametrize("exported", ALLOCATOR_VARIABLES)
def test_segments_expand_in_trainers_alone_whatever_was_exported(resolved: Resolve, exported: str) -> None:
    """Engines sleep by a memory saver, which cannot unmap such segments."""
    shell = {exported: "expandable_segments:True,garbage_collection_threshold:0.5", "PATH": "/bin"}
    for kind, flags in environments(resolved("glm5").config).items():
        started = started_with(shell, as_environment(flags))
        allocator = {name: started[name] for name in ALLOCATOR_VARIABLES if name in started}
        assert allocator == ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if kind == TRAINER else {})
        assert started["PATH"] == "/bin"


@pytest.mark.parametrize(
    "given", ["PYTORCH_ALLOC_CONF=max_split_size_mb:64", "LD_PRELOAD=/x/torch_memory_saver_hook_mode_preload.abi3.so"]
)
def test_a_site_that_chooses_another_allocator_or_a_saver_gets_no_segments_that_expand(
    resolved: Resolve, given: str
) -> None:
    config = resolved("glm5", set=f"site.trainer_environment=[{given}]").config
    assert "PYTORCH_CUDA_ALLOC_CONF" not in as_environment(trainer_environment(config))
    assert find_env_conflicts(config) == []


@pytest.mark.parametrize(
    ("hardware", "layout", "queues"),
    [
        ("h200", "tensor_model_parallel_size=4", "1"),
        ("h200", "tensor_model_parallel_size=1 parallel.context_parallel_size=2", "1"),
        ("h200", "tensor_model_parallel_size=1 parallel.context_parallel_size=1", None),
        ("b200", "tensor_model_parallel_size=4", None),
    ],
)
def test_one_work_queue_where_kernels_have_to_start_in_order(
    resolved: Resolve, hardware: str, layout: str, queues: str | None
) -> None:
    config = resolved("qwen3_4b", hardware=hardware, set=f"parallel.{layout}").config
    assert as_environment(trainer_environment(config)).get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
