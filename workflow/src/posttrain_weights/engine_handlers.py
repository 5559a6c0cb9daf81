"""Handlers in an SGLang rank that report the slices it holds and their digests."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain_weights.channel import Channel
from posttrain_weights.digest import Digester, as_text, together
from posttrain_weights.load_tracer import Kept, LoadWeightsTracer
from posttrain_weights.receiver import Receiver
from posttrain_weights.transport import rendezvous

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


# Tensors that MLA's attention derives from kv_b_proj.
DERIVED = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")


class RearrangedError(RuntimeError):
    """A parameter no longer has the layout that the model's loader fills."""


class StaleError(RuntimeError):
    """Values derived from weights do not match the weights."""


@dataclass(frozen=True)
class _Found:
    """Where a model stores the sent tensors.

    Args:
        kept: All slices.
        layouts: Layouts of the parameters when they were traced.
    """

    kept: list[Kept]
    layouts: dict[str, Layout]


# A process has one trained model; a draft model has another id.
_FOUND: dict[int, _Found] = {}
_RECEIVERS: dict[int, Receiver] = {}


def answer(handle: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Handle one of our commands; pass SGLang's own actions on to SGLang.

    A failure must also return an answer, because SGLang gathers the answers of all ranks and would wait forever.
    """
    if not action.startswith("{"):
        return handle(checker, action, *args, **kwargs)
    order, place = json.loads(action), checker._parallelism_info(role=kwargs["role"])
    if "first_rank" in order:
        order["rank"] = order.pop("first_rank") + place.tp_rank
    try:
        told = {"answer": CALLS[order.pop("call")](checker._get_model(), **order)}
    except Exception as error:
        logging.getLogger(__name__).exception("an order about weights failed")
        told = {"error": f"{type(error).__name__}: {error}"}
    return {"checksums": told, "per_gpu_checksum": "", "parallelism_info": place.model_dump()}


def parts(model: Any, tensors: Sequence[tuple[str, list[int], str]]) -> str:
    """Trace and return where the model stores each sent tensor.

    Args:
        model: This rank's model.
        tensors: (name, shape, safetensors dtype) of everything that an update sends.

    Returns:
        Packed: "parts": [index in `tensors`, row, column, rows, columns, torch dtype] each; "derived": names of
            tensors that a parameter is computed from but does not copy.
    """
    parameters = dict(model.named_parameters())
    record = LoadWeightsTracer(parameters)
    with torch.no_grad(), record:
        model.load_weights((name, record.sent(name, shape, dtype)) for name, shape, dtype in tensors)
    _FOUND[id(model)] = _Found(record.kept, {name: _layout(parameter) for name, parameter in parameters.items()})
    index = {name: number for number, (name, _, _) in enumerate(tensors)}
    found = [[index[kept.name], *kept.box, type_of(parameters[kept.parameter])] for kept in record.kept]
    return pack({"parts": found, "derived": sorted(set().union(*record.derived.values()))})


def digest(model: torch.nn.Module, key: str) -> str:
    """Return one digest of all parts; see `together`.

    Raises:
        RearrangedError: See `_views`.
        StaleError: A derived value does not match the weights; names it.
    """
    _check_derived(model)
    return as_text(together(_digests(model, key), bytes.fromhex(key)))


def digests(model: torch.nn.Module, key: str) -> str:
    """Return the digests of all slices, in order.

    Args:
        model: Of this rank.
        key: Key of `Digester`, hexadecimal.

    Returns:
        Packed: 32 hexadecimal digits each.
    """
    return pack([as_text(found) for found in _digests(model, key)])


def join(model: torch.nn.Module, place: Any, rank: int, size: int, senders: int, seconds: float, changes: bool) -> str:
    """Join the trainer's group and receive the transfer plan; see `Channel` and `Receiver`."""
    device, relays = next(model.parameters()).device, 0 if changes else senders
    channel = Channel(rendezvous(place, size, seconds), rank, size, seconds, relays, device)
    _RECEIVERS[id(model)] = Receiver(channel, range(senders), changes)
    return ""


def receive(model: Any) -> str:
    """Receive one transfer into the slices, and return its bytes."""
    num_bytes = _RECEIVERS[id(model)].receive(_views(model))
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()
    return str(num_bytes)


def pack(content: Any) -> str:
    """Return content as compressed text; `unpacked` reads it."""
    return base64.b64encode(zlib.compress(json.dumps(content).encode(), 1)).decode()


def unpacked(text: str) -> Any:
    """Return the packed content.

    Raises:
        ValueError: The text is not packed content.
    """
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"not packed: {error}") from error


def type_of(tensor: torch.Tensor) -> str:
    """Return the torch name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def _digests(model: torch.nn.Module, key: str) -> torch.Tensor:
    """Return [parts, 2] int64, on the CPU."""
    kept, views = _FOUND[id(model)].kept, _views(model)
    corners = [(part.box.row, part.box.column) for part in kept]
    return Digester.of_parts(bytes.fromhex(key), views, corners)


def _views(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parts as the model has them now.

    Raises:
        RearrangedError: A parameter's size or strides differ from when it was traced.
    """
    parameters, found = dict(model.named_parameters()), _FOUND[id(model)]
    if changed := [name for name, layout in found.layouts.items() if _layout(parameters[name]) != layout]:
        raise RearrangedError(f"{len(changed)} parameters were rearranged after loading: {', '.join(changed[:5])}")
    return [part.view(parameters[part.parameter]) for part in found.kept]


@torch.no_grad()
def _check_derived(model: Any) -> None:
    """Have SGLang recompute all derived values, layer by layer, and compare bits."""
    stale = []
    for name, module in model.named_modules():
        before = {
            attribute: found.clone() for attribute in DERIVED if (found := _tensor(module, attribute)) is not None
        }
        if before:
            model.post_load_weights(weight_names=[f"{name}.kv_b_proj.weight"])
        stale += [f"{name}.{attribute}" for attribute, had in before.items() if _differs(had, module, attribute)]
    if stale:
        raise StaleError(f"{', '.join(stale[:5])} ({len(stale)} in all) did not follow from the weights")


def _differs(before: torch.Tensor, module: torch.nn.Module, attribute: str) -> bool:
    after = _tensor(module, attribute)
    if after is None or (after.shape, after.dtype) != (before.shape, before.dtype):
        return True
    return not torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (before, after)))


def _tensor(module: torch.nn.Module, attribute: str) -> torch.Tensor | None:
    found = getattr(module, attribute, None)
    return found if isinstance(found, torch.Tensor) else None


def _layout(parameter: torch.Tensor) -> Layout:
    return parameter.shape, parameter.stride(), parameter.dtype


CALLS: Mapping[str, Callable[..., str]] = {call.__name__: call for call in (parts, digest, digests, join, receive)}
