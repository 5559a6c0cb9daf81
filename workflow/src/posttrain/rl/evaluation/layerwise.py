"""Computes a checkpoint's log-probabilities with transformers' model and loader, whole or one decoder layer at a time.

A whole model is loaded with `from_pretrained`. A model that does not fit into a node's memory is built on the meta
device, where weights take no memory. Each sequence runs the forward pass in its own thread. The threads synchronise
before every decoder layer, which is then loaded from the shards, and after it, when it is dropped. So only one layer is
in memory at a time, and every weight is read once. Both ways compute the same numbers, in FP32. A vision tower is
loaded and not used.

Source: transformers 5.23, `PreTrainedModel._load_pretrained_model`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.formats.config_patch import apply_changes, read_patch
from posttrain.checkpoint.formats.config_sections import CONFIG
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.modelling import import_modelling
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.config.families import FAMILIES, Family
from posttrain.report.progress import ProgressBar
from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable

_ALIASED = ("/model_type", "/architectures")
# Token ids of a prompt and of its continuation.
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Loading:
    """Problems that transformers reports while loading a checkpoint.

    Args:
        missing: Weights of the model that the checkpoint lacks, which would be random.
        unexpected: Tensors that the model lacks, except those of MTP layers.
        mismatched: Tensors whose shape differs from the model's, and failed conversions.
    """

    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[str]

    def lines(self) -> list[str]:
        """Return a line for each wrong tensor."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "another shape": self.mismatched}
        return [f"{name}: {kind}" for kind, names in kinds.items() for name in sorted(names)]


def logprobs_whole(
    folder: Path, pairs: Sequence[Pair], mtp_layers: Collection[int]
) -> tuple[list[list[float]], Loading]:
    """Load a whole checkpoint and compute log-probabilities.

    Args:
        folder: In Hub layout, not quantised.
        pairs: Prompt and continuation tokens; may be empty.
        mtp_layers: Numbers of the MTP layers, which transformers does not load.

    Returns:
        Natural-log probability of each token of each continuation at temperature 1, and the loading problems.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = _config_of(folder)
    family = FAMILIES[config.model_type]
    loaded: Any = _model_class(config).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below instead of raised
        local_files_only=True,
    )
    model, told = loaded
    failed = [str(failure) for failure in told.get("error_msgs", ())]
    # transformers reports none of these.
    hidden = [name for name in CheckpointReader(folder) if family.mtp_prefix and name.startswith(family.mtp_prefix)]
    unexpected = {*map(str, told["unexpected_keys"]), *hidden}
    loading = _loading(
        told["missing_keys"], unexpected, [*told["mismatched_keys"], *failed], _mtp_names(family, mtp_layers)
    )
    if loading.lines():
        return [], loading
    make_indexers_stable(model.eval())
    return [_logprobs(model, pair) for pair in pairs], loading


def logprobs_by_layer(
    folder: Path, pairs: Sequence[Pair], mtp_layers: Collection[int]
) -> tuple[list[list[float]], Loading]:
    """Like `logprobs_whole`, with one decoder layer in memory at a time."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for each layer
    layered = _LayeredModel(folder, mtp_layers)
    try:
        answers = layered.logprobs(pairs) if pairs and not layered.loading.lines() else layered.load_all()
    except _NotWholeError:
        answers = layered.load_all()  # to report every problem, not only the first
    return answers, layered.loading


def _config_of(folder: Path) -> Any:
    """Return the config under the model's own type; aliases are for stacks that do not know the model."""
    from transformers import AutoConfig

    content = read_object(folder / CONFIG)
    changes = [change.reverse for change in read_patch(folder).get(CONFIG, []) if change.path in _ALIASED]
    content = apply_changes(content, changes, CONFIG)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def _model_class(config: Any) -> Any:
    """Return the family's class; transformers' choice for causal models would drop a vision tower silently."""
    module = import_modelling(config.model_type)
    return getattr(module, FAMILIES[config.model_type].hub_class)


def _mtp_names(family: Family, mtp_layers: Collection[int]) -> tuple[str, ...]:
    """Return how the names of MTP layers' tensors begin."""
    apart = [family.mtp_prefix] if family.mtp_prefix and mtp_layers else []
    return (*(f"{family.text_prefix}layers.{layer}." for layer in mtp_layers), *apart)


def _loading(
    missing: Iterable[Any], unexpected: Iterable[Any], mismatched: Iterable[Any], mtp_names: tuple[str, ...]
) -> Loading:
    names = [str(name) for name in unexpected if not str(name).startswith(mtp_names)]
    return Loading([*map(str, missing)], names, [*map(str, mismatched)])


@torch.inference_mode()
def _logprobs(model: Any, pair: Pair) -> list[float]:
    prompt, response = pair
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
    chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[0, len(prompt) :, None])
    return [float(value) for value in chosen[:, 0]]


class _NotWholeError(Exception):
    """A layer does not match the model, so nothing can be computed."""


class _LayeredModel:
    """A transformers model that holds the weights of one decoder layer at a time.

    Args:
        folder: Checkpoint in Hub layout, not quantised.
        mtp_layers: See `logprobs_whole`.
    """

    def __init__(self, folder: Path, mtp_layers: Collection[int]):
        config = _config_of(folder)
        self._reader, self._mtp_names = CheckpointReader(folder), _mtp_names(FAMILIES[config.model_type], mtp_layers)
        # Non-persistent buffers, like the rotary frequencies, are computed as usual.
        with _weights_on_meta():
            self._model = _model_class(config)._from_config(config, dtype=torch.float32)
        self._model.eval()
        make_indexers_stable(self._model)
        decoder = self._model.get_decoder()
        prefix = next(name for name, module in self._model.named_modules() if module is decoder)
        self._layers = {f"{prefix}.layers.{number}.": layer for number, layer in enumerate(decoder.layers)}
        self._missing, self._unexpected = set[str](), set[str]()
        self._mismatched = set[str]()
        layers = tuple(self._layers)
        self._load("", [name for name in self._reader if not name.startswith(layers)])
        self._model.tie_weights()

    @property
    def loading(self) -> Loading:
        """The problems of all layers loaded so far."""
        return _loading(self._missing, self._unexpected, self._mismatched, self._mtp_names)

    def load_all(self) -> list[list[float]]:
        """Load and drop each layer, without a forward pass."""
        with ProgressBar("layers", len(self._layers), "layers") as progress:
            for prefix in self._layers:
                self._load(prefix, [name for name in self._reader if name.startswith(prefix)])
                self._drop_layer(prefix, progress.advance)
        return []

    def logprobs(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Compute all pairs in one pass over the layers; see `logprobs_whole`."""
        with ProgressBar("layers", len(self._layers), "layers") as progress:
            barriers = []
            for prefix, layer in self._layers.items():
                before = threading.Barrier(len(pairs), functools.partial(self._load_layer, prefix))
                behind = threading.Barrier(len(pairs), functools.partial(self._drop_layer, prefix, progress.advance))
                barriers += [before, behind]
                layer.forward = functools.partial(_between, layer.forward, before, behind)
            with ThreadPoolExecutor(len(pairs)) as pool:
                asked = [pool.submit(self._ask, pair, barriers) for pair in pairs]
        failures = [failure for one in asked if (failure := one.exception())]
        # A failed sequence breaks the others' barriers: report its own error first.
        for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
            raise failure
        return [one.result() for one in asked]

    def _ask(self, pair: Pair, barriers: Sequence[threading.Barrier]) -> list[float]:
        try:
            return _logprobs(self._model, pair)
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            raise

    def _load_layer(self, prefix: str) -> None:
        self._load(prefix, [name for name in self._reader if name.startswith(prefix)])
        if self.loading.lines():
            raise _NotWholeError(prefix)

    def _drop_layer(self, prefix: str, advance: Callable[[], None]) -> None:
        with torch.inference_mode(False):
            for module in self._layers[prefix].modules():
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, torch.nn.Parameter(weight.to("meta"), requires_grad=False))
        advance()

    def _load(self, prefix: str, names: Sequence[str]) -> None:
        """Have transformers load the tensors of a layer, or with prefix "" those outside all layers."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Any = get_model_conversion_mapping(self._model)
        config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping, ignore_mismatched_sizes=True)
        with torch.inference_mode(False):
            tensors = {name: self._reader.tensor(name) for name in names}
            told, _ = convert_and_load_state_dict_in_model(self._model, tensors, config)
        self._unexpected |= set(told.unexpected_keys)
        self._mismatched |= {str(name) for name in told.mismatched_keys} | {*map(str, told.conversion_errors)}
        self._missing |= set(self._in_place(prefix)) & set(told.missing_keys)

    def _in_place(self, prefix: str) -> Iterator[str]:
        """Yield the names of the weights in a layer (or outside all layers); a tied weight has its source's name."""
        layers = tuple(self._layers)
        for name in self._model.state_dict():
            is_here = name.startswith(prefix) if prefix else not name.startswith(layers)
            if is_here and name not in self._model.all_tied_weights_keys:
                yield name


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Build modules with weights on the meta device, but real buffers."""
    kind: Any = torch.nn.Module
    register = kind.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, weight: torch.nn.Parameter | None) -> None:
        register(module, name, weight)
        if weight is not None:
            module._parameters[name] = torch.nn.Parameter(weight.to("meta"), requires_grad=False)

    kind.register_parameter = register_on_meta
    try:
        yield
    finally:
        kind.register_parameter = register


def _between(
    forward: Callable[..., Any], before: threading.Barrier, behind: threading.Barrier, *given: Any, **named: Any
) -> Any:
    """Run a layer once all sequences have reached it, and continue once all have left it."""
    before.wait()
    answer = forward(*given, **named)
    behind.wait()
    return answer
