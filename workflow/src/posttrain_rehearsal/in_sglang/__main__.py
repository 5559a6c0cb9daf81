"""Resolves SGLang's command lines and loads an update, on simulated GPUs.

It reads `given.json` in a folder, and writes a JSON file there for each engine and each rank. SGLang is imported once,
and each engine runs in a fork, so that one engine's settings do not affect the next.

Written against SGLang 0.5.23: `srt/server_args.py`, `srt/distributed/bootstrap.py`, `srt/model_loader/loader.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import inspect
import io
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from stand_in_gpus import MissingKernelError, OnMeta, provide_gpu

from posttrain_weights.load_tracer import LoadWeightsTracer

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Scales of an FP8 cache, which are not part of an update.
CACHE_SCALES = (".k_scale", ".v_scale")
# From `linux/prctl.h`: the process ends with its parent.
PR_SET_PDEATHSIG = 1


def resolve(argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return SGLang's resolved arguments, and a report.

    Returns:
        The arguments, None if SGLang rejects them; and "refused" with its message, or "changed": [flag, or "" if unset,
        field, requested value, resolved value], "kv_cache_dtype", "version".
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            arguments = prepare_server_args(argv)
    except SystemExit:
        return None, {"refused": errors.getvalue().strip().splitlines()[-1]}
    logging.getLogger().setLevel(logging.ERROR)
    try:
        arguments.resolve_once()
    except Exception as error:
        return None, {"refused": _told(error)["message"], "where": _told(error)["where"]}
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = {option: action.dest for action in parser._actions for option in action.option_strings}
    asked = {options[word]: word for word in argv if word in options}
    resolved, raw = arguments.resolved_dict(), arguments._raw_input
    left_out = ("tokenizer_path",)  # the model's path, a temporary folder here
    names = [name for name in resolved if not name.startswith("_") and name not in left_out]
    changed = {name: resolved[name] for name in names if resolved[name] != raw.get(name)}
    return arguments, {
        "refused": "",
        "changed": [
            [asked.get(name, ""), name, _short(raw.get(name)), _short(changed[name])]
            for name in sorted(changed, key=lambda name: name not in asked)
        ],
        "version": version("sglang"),
        "kv_cache_dtype": resolved["kv_cache_dtype"],
    }


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 120 else f"{text[:117]}..."


def _told(error: BaseException) -> dict[str, str]:
    """Return an error's type, message and place in SGLang's code."""
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('site-packages/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    where = next((frame for frame in reversed(frames) if frame.startswith("sglang/")), frames[-1])
    return {"kind": type(error).__name__, "message": str(error) or type(error).__name__, "where": where}


def make_groups(arguments: Any, rank: int, world_size: int, gpu: int) -> None:
    """Create SGLang's groups for one rank of an engine; nothing can be sent."""
    import torch.distributed as dist
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from torch.testing._internal.distributed.fake_pg import FakeStore

    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    real: Any = dist.new_group

    def new_group(ranks: Any, **kwargs: Any) -> Any:
        return real(ranks, backend="fake", group_desc=kwargs.get("group_desc"))

    dist.new_group = new_group  # type: ignore[assignment]
    make = parallel_state.GroupCoordinator.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def without_communicators(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        make(**bound.arguments | {name: False for name in bound.arguments if name.startswith("use_")})

    parallel_state.GroupCoordinator.__init__ = without_communicators
    bootstrap._init_parallel_groups(backend="fake", dist_init_method="env://", server_args=arguments, gpu_id=gpu)


def build(arguments: Any) -> Any:
    """Return this rank's model on the meta device, built as in a scheduler."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    known, how = model_config_of(arguments), LoadConfig(load_format="dummy")
    bootstrap.init_layer_runtime(model_config=known)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    initialize_bf16_gemm_config()
    quantization = loader._get_quantization_config(known, how)
    with set_default_torch_dtype(known.dtype), torch.device("meta"):
        return loader._initialize_model(known, how, quantization)


def receive(model: Any, buckets: list[list[list[Any]]], has_fp8_cache: bool) -> dict[str, Any]:
    """Load all buckets into a model, and report the result.

    Args:
        model: On the meta device.
        buckets: Lists of [name, shape, dtype].
        has_fp8_cache: Whether the model uses scales of the cache.
    """
    parameters = dict(model.named_parameters())
    record, last, failed = LoadWeightsTracer(parameters), "", None
    names = [name for bucket in buckets for name, _, _ in bucket]

    def stream(bucket: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, shape, dtype in bucket:
            last = name
            yield name, record.sent(name, shape, dtype)

    try:
        with record:
            for bucket in buckets:
                model.load_weights(stream(bucket))
    except Exception as error:
        failed = {**_told(error), "name": last}
    layers = model.config.num_hidden_layers
    unread = [name for name in names if name not in record.read]
    drafted = {name for name in unread if name.startswith("mtp.")}
    drafted |= {name for name in unread if (found := LAYER.match(name)) and int(found[1]) >= layers}
    elsewhere = _of_other_ranks(model, record.read, unread)
    spared = [name for name in parameters if name.endswith(CACHE_SCALES) and not has_fp8_cache]
    written = {name: sum(math.prod(place[1]) for place in parts) for name, parts in record.parts.items()}
    whole = {name: parameter.numel() for name, parameter in parameters.items()}
    return {
        "model": type(model).__name__,
        "parameters": len(parameters),
        "sent": len(names),
        "elsewhere": len(elsewhere),
        "drafted": len(drafted),
        "spared": len(spared),
        "failed": failed,
        "unknown": [] if failed else [name for name in unread if name not in elsewhere | drafted],
        "never": [] if failed else [n for n in parameters if n not in written and n not in spared],
        # Padded parameters, such as the vocabulary's, are filled with zeros elsewhere.
        "partly": [] if failed else [n for n, size in written.items() if size < whole[n] and n not in record.filled],
        "twice": sorted(
            f"{name} by {', '.join(sorted(set().union(*by)))}"
            for name, parts in record.parts.items()
            for by in parts.values()
            if len(by) > 1 or written[name] > whole[name]
        ),
        "odd": record.odd,
        "derived": sorted(f"{name} of {', '.join(sorted(by))}" for name, by in record.derived.items()),
    }


def _of_other_ranks(model: Any, read: set[str], unread: list[str]) -> set[str]:
    """Return unread expert tensors that SGLang's table assigns to other ranks, if this rank has the same kind."""
    known = {(found[1], name[found.end() :]) for name in read if (found := EXPERT.match(name))}
    others = set()
    for name in unread:
        if not (found := EXPERT.match(name)) or (found[1], name[found.end() :]) not in known:
            continue
        experts, number = model.get_submodule(found[1]), int(found[2])
        is_local = experts._map_global_expert_id_to_local_expert_id(number) != -1
        if not is_local and number < experts._num_global_routed:
            others.add(name)
    return others


def main(folder: Path) -> None:
    """Rehearse the engines of `given.json` in a folder."""
    given = json.loads((folder / "given.json").read_text())
    provide_gpu(given["device"])
    logging.getLogger("sglang").setLevel(logging.ERROR)  # models that lack a package are not used by an engine
    import sglang.srt.models.registry  # noqa: F401  once for all engines

    for engine in given["engines"]:
        _in_child(functools.partial(_engine, folder, given, engine))


def _engine(folder: Path, given: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    os.environ.update(engine["environment"])
    arguments, told = resolve(engine["argv"])
    (folder / f"{engine['name']}.json").write_text(json.dumps(told))
    for rank in engine["ranks"] if arguments else []:
        _in_child(functools.partial(_rank, folder, given, engine, arguments, told, rank))


def _rank(folder: Path, given: Any, engine: Any, arguments: Any, resolved: Mapping[str, Any], rank: int) -> None:
    told: dict[str, Any] = {}
    OnMeta().__enter__()
    try:
        make_groups(arguments, rank, engine["world_size"], rank % given["device"]["count"])
        model = build(arguments)
    except Exception as error:
        # An error about a driver or a kernel does not concern the engine.
        is_here = not isinstance(error, MissingKernelError | ImportError) and "CUDA" not in str(error)
        told = {"not_built": {**_told(error), "is_refused": is_here and isinstance(error, ValueError | AssertionError)}}
    else:
        told = receive(model, given["buckets"], "fp8" in str(resolved["kv_cache_dtype"]))
    (folder / f"{engine['name']}.{rank}.json").write_text(json.dumps(told))


def _in_child(work: Callable[[], None]) -> None:
    """Run a function in a fork, and wait for it; print its error."""
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        work()
    except BaseException:
        logging.getLogger().exception("an engine's rehearsal ended")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
