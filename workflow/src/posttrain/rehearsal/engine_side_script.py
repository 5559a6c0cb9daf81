"""What SGLang makes of its command lines and of an update, on GPUs that are only said to be there.

It runs in SGLang's environment, which need not have this package: it is started by its path, and imports nothing of
ours. What is asked lies in `given.json` of a folder; each engine and each rank leaves a JSON there. An engine is a fork:
SGLang is imported once, and what one resolves the next does not find.

Written against SGLang 0.5.23: `srt/server_args.py`, `srt/distributed/bootstrap.py`, `srt/model_loader/loader.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import logging
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
# Compiled packages that SGLang imports for NVIDIA's GPUs while it resolves or builds, and that need a driver.
KERNELS = ("sgl_kernel", "deep_gemm", "deep_ep", "flash_mla", "cuda", "cutlass")
# What a class asks of them while it is built; an H200's, as in the rehearsal of the trainer.
MULTIPROCESSORS = 132
ANSWERS = {"deep_gemm.get_num_sms": MULTIPROCESSORS}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Scales of an FP8 cache: no part of an update.
CACHE_SCALES = (".k_scale", ".v_scale")


class MissingKernelError(NotImplementedError):
    """A kernel was called, and there is none."""


class Kernel:
    """A name of a compiled package: it can be imported, and decorates; called, it tells its name."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Kernel:
        return self

    def __or__(self, other: Any) -> Kernel:
        return self

    __ror__ = __or__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in ANSWERS:
            return ANSWERS[self._name]
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a decorator
        raise MissingKernelError(f"{self._name} is a kernel")


class KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the compiled packages be imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return where a module comes from."""
        is_kernel = fullname.partition(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_kernel else None

    def create_module(self, spec: Any) -> None:
        """Let Python make the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it every name."""
        kernel = Kernel(module.__name__)
        module.__getattr__ = lambda name: getattr(kernel, name)  # type: ignore[method-assign]


class Stream:
    """A stream or an event: nothing runs on it."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class OnMeta(TorchFunctionMode):
    """What is made on a GPU has a shape and no memory."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "meta"
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.to:
            args = tuple("meta" if _is_gpu(word) else word for word in args)
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def provide_gpu(device: Mapping[str, Any]) -> None:
    """Say that GPUs are there; before SGLang is imported, which looks once.

    Args:
        device: "name", "capability" (major, minor), "memory_bytes" and "count" on a node.
    """
    capability, memory = tuple(device["capability"]), device["memory_bytes"]
    known = types.SimpleNamespace(
        name=f"NVIDIA {device['name']}",
        major=capability[0],
        minor=capability[1],
        total_memory=memory,
        multi_processor_count=MULTIPROCESSORS,
        gcnArchName="",
    )
    told = {
        "is_available": True,
        "device_count": device["count"],
        "get_device_capability": capability,
        "get_device_name": known.name,
        "get_device_properties": known,
        "current_device": 0,
        "mem_get_info": (memory, memory),
        "memory_allocated": 0,
        "empty_cache": None,
        "set_device": None,
        "synchronize": None,
    }
    for name, value in told.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Stream  # type: ignore
    # A build for CUDA has a version here; which one no setting of ours depends on.
    torch.version.cuda = torch.version.cuda or "13.0"
    with contextlib.suppress(ImportError):
        import tvm_ffi  # noqa: F401  looks for CUDA's own Python when imported, and does without
    sys.meta_path.insert(0, KernelPackages())


class Record(TorchDispatchMode):
    """Follows what is sent into the parameters, through whatever is made of it on the way.

    Args:
        parameters: Name -> parameter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self._owner = {_memory(parameter): name for name, parameter in parameters.items()}
        self._sources: dict[int, set[str]] = {}
        # A tensor that ends gives its number to another.
        self._alive: list[torch.Tensor] = []
        self.read: set[str] = set()
        self.filled: set[str] = set()
        # Parameter -> which part of it -> times it was written, and by what.
        self.parts: dict[str, dict[tuple[Any, ...], list[set[str]]]] = {}
        self.odd: list[str] = []

    def sent(self, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        """Return a tensor that is sent: [shape] without memory."""
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        self._sources[_memory(tensor)] = {name}
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [item for word in args for item in (word if isinstance(word, list | tuple) else [word])]
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        sources = set().union(*(self._sources.get(_memory(tensor), set()) for tensor in tensors))
        target = self._owner.get(_memory(tensors[0])) if tensors else None
        kind = func._schema.name
        if target and kind in ("aten::copy_", "aten::fill_", "aten::zero_"):
            self._write(target, tensors, sources, kind == "aten::copy_")
        elif sources:
            for tensor in made if isinstance(made, list | tuple) else [made]:
                if isinstance(tensor, torch.Tensor) and _memory(tensor) not in self._owner:
                    self._sources.setdefault(_memory(tensor), set()).update(sources)
                    self._alive.append(tensor)
        return made

    def _write(self, target: str, tensors: list[torch.Tensor], sources: set[str], is_copy: bool) -> None:
        part = tensors[0]
        if not is_copy:
            self.filled.add(target)
            return
        if tensors[1].shape != part.shape:
            self.odd.append(f"{', '.join(sorted(sources))} {[*tensors[1].shape]} into {[*part.shape]} of {target}")
        self.read |= sources
        place = (part.storage_offset(), tuple(part.shape), part.stride())
        self.parts.setdefault(target, {}).setdefault(place, []).append(sources)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def resolve(argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return SGLang's arguments, resolved, and what is to be told.

    Returns:
        Its arguments, None where it refused; "refused" with its words, and "asked", "resolved": field -> value.
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
    changed = {name: value for name, value in resolved.items() if value != raw.get(name) and not name.startswith("_")}
    return arguments, {
        "refused": "",
        "changed": [[asked.get(name, ""), name, _short(raw.get(name)), _short(changed[name])] for name in changed],
        "kv_cache_dtype": resolved["kv_cache_dtype"],
    }


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 120 else f"{text[:117]}..."


def _told(error: BaseException) -> dict[str, str]:
    """Return a failure in words, and where in SGLang's code."""
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('site-packages/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    where = next((frame for frame in reversed(frames) if frame.startswith("sglang/")), frames[-1])
    return {"kind": type(error).__name__, "message": str(error) or type(error).__name__, "where": where}


def make_groups(arguments: Any, rank: int, world_size: int, gpu: int) -> None:
    """Make SGLang's own groups for one rank of an engine; nobody else is there, and nothing can be sent."""
    import torch.distributed as dist
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from torch.testing._internal.distributed.fake_pg import FakeStore

    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    real = dist.new_group

    def new_group(ranks: Any, **kwargs: Any) -> Any:
        return real(ranks, backend="fake", group_desc=kwargs.get("group_desc"))

    dist.new_group = new_group
    make = parallel_state.GroupCoordinator.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def without_communicators(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        make(**bound.arguments | {name: False for name in bound.arguments if name.startswith("use_")})

    parallel_state.GroupCoordinator.__init__ = without_communicators
    bootstrap._init_parallel_groups(backend="fake", dist_init_method="env://", server_args=arguments, gpu_id=gpu)


def build(arguments: Any) -> Any:
    """Return the model of this rank on the meta device, made as a scheduler makes it."""
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


def load(model: Any, buckets: list[list[list[Any]]], has_fp8_cache: bool) -> dict[str, Any]:
    """Send all buckets to a model, and return what became of them.

    Args:
        model: On the meta device.
        buckets: Of [name, shape, dtype].
        has_fp8_cache: Scales of the cache are read.
    """
    parameters = dict(model.named_parameters())
    record, last, failed = Record(parameters), "", None
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
    drafted = {name for name in unread if (found := LAYER.match(name)) and int(found[1]) >= layers}
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
        # What is padded, as a vocabulary, is filled with zeros beside.
        "partly": [] if failed else [n for n, size in written.items() if size < whole[n] and n not in record.filled],
        "twice": sorted(
            f"{name} by {', '.join(sorted(set().union(*by)))}"
            for name, parts in record.parts.items()
            for by in parts.values()
            if len(by) > 1 or written[name] > whole[name]
        ),
        "odd": record.odd,
    }


def _of_other_ranks(model: Any, read: set[str], unread: list[str]) -> set[str]:
    """Return the tensors of experts that other ranks have, by SGLang's own table; of names that this rank's have too."""
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
    """Answer what is asked in a folder."""
    given = json.loads((folder / "given.json").read_text())
    provide_gpu(given["device"])
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
        # Whatever asks for a driver or a kernel says nothing about the engine.
        is_here = not isinstance(error, MissingKernelError | ImportError) and "CUDA" not in str(error)
        told = {"not_built": {**_told(error), "is_refused": is_here and isinstance(error, ValueError | AssertionError)}}
    else:
        told = load(model, given["buckets"], "fp8" in str(resolved["kv_cache_dtype"]))
    (folder / f"{engine['name']}.{rank}.json").write_text(json.dumps(told))


def _in_child(work: Callable[[], None]) -> None:
    """Do something in a fork, and wait for it; what it could not say it has printed."""
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        return
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
