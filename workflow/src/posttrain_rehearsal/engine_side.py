"""The engines of a configuration: SGLang resolves their command lines and loads a weight update.

SGLang runs in its own environment on simulated GPUs (`in_sglang`).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import posttrain_weights
from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.hf_config import fixed_values
from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.quantized_names import is_mtp
from posttrain.cluster.processes import start_child
from posttrain.config.command_line import CONFIG_DIR
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.flags.flag import Flag
from posttrain.plan.flags.sglang_flags import nodes_per_engine, roles, sglang_flags, world_size
from posttrain.rl.engines.buckets import make_buckets
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.weight_sync.publish import MIB, served_format
from posttrain.store import read_json, write_json
from posttrain_rehearsal.in_sglang.stand_in_gpus import KERNELS
from posttrain_rehearsal.rank_subset import shallow
from posttrain_weights.load_tracer import DTYPES

# Folder of SGLang's environment, if it is outside of the clone.
VARIABLE = "POSTTRAIN_SGLANG_ENV"
STAMP = ".posttrain-sglang-cpu"
MAX_NAMED = 5
STAND_INS = {
    "GPUs, for SGLang": "architecture, memory and number are the configured ones; a driver or NVML answers nothing",
    "kernels, for SGLang": f"packages ({', '.join(KERNELS)}) can be imported and do nothing; flashinfer is not there, "
    "and defaults that name it become others (sampling: pytorch)",
    "groups, for SGLang": "are its own, of the engine's size; nothing is sent, and none of its communicators is made",
    "weights, for SGLang": "shapes without memory, of few layers; an update meets parameters as they were built: what "
    "rearranges or requantises them after loading (process_weights_after_loading) does not run, and values derived by "
    "load_weights itself are not looked at",
}
Sent = tuple[str, TensorSpec]


def home() -> Path | None:
    """Return the folder of SGLang's environment, or None."""
    folder = Path(os.environ.get(VARIABLE) or CONFIG_DIR.parent / ".envs" / "sglang-cpu").absolute()
    return folder if (folder / STAMP).exists() else None


def rehearse_engines(config: Config, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Resolve the command line of each kind of engine, and load an update into it.

    Args:
        config: The resolved configuration.
        changed: For tests: additional "argv", or "sent" instead of the transfer's tensors.

    Returns:
        "not_rehearsed": reason, or ""; "engines": one row each; "problems"; "seconds"; "stand_ins".
    """
    started, changed = time.perf_counter(), changed or {}
    found: dict[str, Any] = {"not_rehearsed": "", "engines": [], "problems": [], "stand_ins": {}}
    if config.engine.kind != "sglang":
        return found | {"not_rehearsed": f"engine.kind = {config.engine.kind} has no SGLang"}
    if not (folder := home()):
        return found | {"not_rehearsed": "`make env-sglang` makes the environment in which SGLang runs"}
    rehearsed = shallow(config)
    sent = changed.get("sent") or [*sent_tensors(rehearsed)]
    with tempfile.TemporaryDirectory() as name:
        given = _given(config, rehearsed, sent, changed.get("argv", ()), Path(name))
        write_json(Path(name) / "given.json", given)
        _run(folder, Path(name), given["engines"][0]["environment"])
        rows = [_row(engine, Path(name)) for engine in given["engines"]]
    problems = [
        problem
        for role, row in zip(roles(config), rows, strict=True)
        for problem in find_engine_problems(row, sglang_flags(config, role))
    ]
    return found | {
        "engines": rows,
        "problems": [problem.as_dict() for problem in problems],
        "seconds": round(time.perf_counter() - started, 1),
        "stand_ins": dict(STAND_INS),
    }


def sent_tensors(config: Config) -> Iterator[Sent]:
    """Yield the tensors of a weight transfer in its order: Hub names, with FP8 codes and scales if engines serve FP8.

    With drafts, engines that started without weights also get the MTP layers from the checkpoint.
    """
    arch, served = config.model.architecture, served_format(config)
    for name, spec in expected_tensors(arch).items():
        if is_mtp(name, arch.num_hidden_layers) and not config.engine.mtp_steps:
            continue
        if served and served.selection.includes(name, spec.shape):
            yield from served.served_specs(name, spec).items()
        else:
            yield name, spec


def _given(
    config: Config, rehearsed: Config, sent: Sequence[Sent], more: Sequence[str], folder: Path
) -> dict[str, Any]:
    arch, hardware, served = rehearsed.model.architecture, config.hardware, served_format(rehearsed)
    quantization = {"quantization_config": served.quantization_config(expected_tensors(arch))} if served else {}
    write_json(folder / "model" / "config.json", hub_config(arch, fixed_values(arch)) | quantization)
    tensors = ((name, torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")) for name, spec in sent)
    dtypes = {name: spec.dtype for name, spec in sent}
    engines = []
    for role in roles(config):
        command = render_engine_command(
            config, 0, folder / "model", "127.0.0.1", 30000, 0, "127.0.0.1:29500", role=role, without_weights=True
        )
        ranks = world_size(config, role)
        engines.append(
            {
                "name": role,
                "argv": [*command.argv[3:], *more],
                "environment": dict(command.env),
                "world_size": ranks,
                "nodes": nodes_per_engine(config, role),
                "ranks": sorted({0, ranks - 1}),
            }
        )
    return {
        "device": {
            "name": hardware.name.upper(),
            "capability": [int(number) for number in hardware.compute_capability.split(".")],
            "memory_bytes": int(hardware.memory_gib_per_gpu * (1 << 30)),
            "count": hardware.gpus_per_node,
        },
        "engines": engines,
        "buckets": [
            [[name, [*tensor.shape], dtypes[name]] for name, tensor in bucket]
            for bucket in make_buckets(tensors, config.engine.weight_bucket_mib * MIB, arch.q_lora_rank > 0)
        ],
    }


def _run(environment: Path, folder: Path, variables: Mapping[str, str]) -> None:
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES")
    shell = {name: value for name, value in os.environ.items() if name not in names}
    own = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "SGLANG_CACHE_DIR": str(folder)}
    own |= {"PYTHONPATH": str(Path(posttrain_weights.__file__).parents[1])}
    words = [str(environment / "bin" / "python"), str(Path(__file__).with_name("in_sglang")), str(folder)]
    start_child(words, env={**shell, **variables, **own}, stdout=sys.stderr).wait()


def _row(engine: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    ended = {"refused": "it ended without a word; what it printed stands above", "where": ""}
    file = folder / f"{engine['name']}.json"
    told = read_json(file) if file.exists() else ended
    loaded = {}
    for rank in engine["ranks"] if not told["refused"] else []:
        file = folder / f"{engine['name']}.{rank}.json"
        loaded[str(rank)] = (
            read_json(file)
            if file.exists()
            else {"not_built": {"kind": "", "message": ended["refused"], "where": "", "is_refused": False}}
        )
    return {"role": engine["name"], "world_size": engine["world_size"], **told, "ranks": loaded}


def find_engine_problems(row: Mapping[str, Any], flags: Sequence[Flag]) -> Iterator[Problem]:
    """Yield arguments that SGLang rejects, and tensors that an update does not load as planned.

    Args:
        row: Result of one kind of engine.
        flags: Its command line.
    """
    if words := row["refused"]:
        keys = [key for item in flags if _is_named(item.name, words) for key in item.keys]
        yield Problem(
            "engine-rejects-flags",
            ", ".join(dict.fromkeys(keys)) or f"engine ({row['role']})",
            f"SGLang refuses: {words}",
            "what its own argument resolution takes",
            f"look at {row.get('where') or 'its command line in the plan'}",
        )
        return
    told: dict[tuple[str, str], list[str]] = {}
    remedies = {}
    for rank, loaded in row["ranks"].items():
        for value, allowed, remedy in _faults(loaded):
            told.setdefault((value, allowed), []).append(rank)
            remedies[value, allowed] = remedy
    for (value, allowed), ranks in told.items():
        key = f"weight transfer ({row['role']}, rank {', '.join(ranks)})"
        yield Problem("engine-computes-otherwise", key, value, allowed, remedies[value, allowed])


def _is_named(flag: str, words: str) -> bool:
    name = flag.removeprefix("--")
    return bool(re.search(rf"\b({re.escape(name)}|{name.replace('-', '_')})\b", words))


def _faults(loaded: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if failed := loaded.get("not_built"):
        if failed["is_refused"]:
            yield f"{failed['kind']}: {failed['message']}", "a model that SGLang builds", f"look at {failed['where']}"
        return
    names = "checkpoint/param_names has the names, SGLang's model class what it knows"
    if failed := loaded["failed"]:
        words = failed["message"].splitlines()[0]
        yield f"{failed['name']}: {failed['kind']}: {words}", "load_weights takes it", f"look at {failed['where']}"
    for kind, found, allowed in (
        ("unknown", "is sent and not loaded", "each tensor that is sent is loaded"),
        ("never", "is never loaded", "each parameter is loaded"),
        ("partly", "is loaded in part", "each parameter is loaded"),
        ("twice", "is loaded more than once", "each parameter is loaded once"),
        ("odd", "has another shape", "each tensor has the shape of its place"),
        ("derived", "is made of a tensor that is sent, and no copy", "digests and sharded transfers know copies"),
    ):
        if some := loaded[kind]:
            more = f" and {len(some) - MAX_NAMED} more" if len(some) > MAX_NAMED else ""
            yield f"{found}: {', '.join(some[:MAX_NAMED])}{more}", allowed, names
