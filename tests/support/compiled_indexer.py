"""The indexer's kernels compiled for GPUs that are not there; as a program it prints their table for decision 028."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from posttrain.rl.megatron_backend.glm5 import index_kernel

TARGETS = {
    "9.0": GPUTarget("cuda", 90, 32),
    "10.0": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = ("score_keys", "keep_best")
_INPUTS = {
    "score_keys": {"queries": "*bf16", "keys": "*bf16", "weights": "*fp32", "first": "*i32", "end": "*i32"},
    "keep_best": {"first": "*i32", "end": "*i32", "places": "*i32"},
}
_NUMBERS = ("num_queries", "num_keys", "stride", "topk")
# GLM-5's indexer.
_CONSTANTS = {
    "score_keys": {
        **{"HEADS": 32, "WIDTH": 128, "PADDED": 128},
        **{"QUERIES": index_kernel.TILE_QUERIES, "KEYS": index_kernel.TILE_KEYS},
    },
    "keep_best": {"SPAN": index_kernel.SPAN},
}
_OPTIONS = {"score_keys": index_kernel.SCORE_OPTIONS, "keep_best": index_kernel.CHOICE_OPTIONS}


class Resources(NamedTuple):
    """What a program of a kernel takes.

    Args:
        registers: Per thread.
        shared: Bytes of shared memory.
        spilled: Bytes of stack of a thread on NVIDIA's, registers that were spilled on AMD's.
    """

    registers: int
    shared: int
    spilled: int


def compiled(name: str, target: GPUTarget) -> Any:
    """Return a kernel as Triton compiles it for GLM-5, whose tensors and rows are aligned to 16 bytes."""
    kernel = getattr(index_kernel, name)
    known = {"uppers": "*u16", "lowers": "*u16", **_INPUTS[name], **dict.fromkeys(_NUMBERS, "i32")}
    constants = _CONSTANTS[name]
    types = {argument: known[argument] for argument in kernel.arg_names if argument not in constants}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=target, options=dict(_OPTIONS[name]))


def resources(kernel: Any) -> Resources:
    """Return what a compiled kernel takes."""
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"^ *\.(\w+): +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
        spilled = int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
        return Resources(int(found["vgpr_count"]), kernel.metadata.shared, spilled)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        asked = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", asked.stdout)[0]
    return Resources(int(registers), kernel.metadata.shared, int(stack))


def table() -> str:
    """Return the resources of each kernel for each GPU, in Markdown."""
    lines = [
        "| GPU | kernel | threads | registers of a thread | shared memory | spilled |",
        "|---|---|---|---|---|---|",
    ]
    for target_name, target in TARGETS.items():
        for name in KERNELS:
            kernel = compiled(name, target)
            of = resources(kernel)
            threads = kernel.metadata.num_warps * target.warp_size
            shared = f"{of.shared / 1024:.0f} KiB"
            lines.append(f"| {target_name} | `{name}` | {threads} | {of.registers} | {shared} | {of.spilled} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
