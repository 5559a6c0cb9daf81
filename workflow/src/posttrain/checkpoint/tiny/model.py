"""Makes a tiny GLM-5, Qwen3 or Qwen3.5 with every part of the large one, in the layout of a Hub repository.

    config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja
    model-00001-of-0000N.safetensors ... model.safetensors.index.json

The weights are random, then warmed up on the task (`tiny_warm_up.py`), then rounded to BF16; the router's bias stays
FP32, as in GLM-5, and so do Qwen3.5's decays and the norms of its delta nets. Names are the Hub's: one tensor per
expert. The MTP layer and the vision tower are random: no step computes with them, and every step must preserve them
(`kept_parts.py`). Qwen3 has neither.

All values come from one seed and deterministic kernels: the same machine type and thread count give the same bytes. A
kill leaves no folder or a `.partial` one; the next attempt starts over, in seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.config_sections import has_sections, text_section
from posttrain.checkpoint.formats.hf_config import MTP_COUNTS, fixed_values
from posttrain.checkpoint.formats.modelling import import_modelling
from posttrain.checkpoint.tiny.kept_parts import (
    INITIALIZER_RANGE,
    joint_mtp_tensors,
    numbered_mtp_tensors,
    randomize_norms,
    vision_tensors,
)
from posttrain.checkpoint.tiny.tokenizer import (
    CONTROL_TOKENS,
    DIGITS,
    Vocabulary,
    make_byte_level_tokenizer,
    make_tokenizer,
    stop_token_ids,
)
from posttrain.checkpoint.tiny.warm_up import Examples, backwards, warm_up
from posttrain.config.families import FAMILIES, dimensions, family_of
from posttrain.config.schema import Architecture
from posttrain.errors import Problem, raise_if_any
from posttrain.plan.sizing.tiny_model import check_made
from posttrain.store import building, write_json

log = logging.getLogger(__name__)

# Several, so that the demo covers the index and the split of a large model.
MIN_SHARDS = 3
# Ends of the names of tensors that are saved in FP32.
IN_FP32 = ("e_score_correction_bias", "linear_attn.A_log", "linear_attn.norm.weight")
# Not zero, so that losing the bias changes the routing.
ROUTER_BIAS_RANGE = 0.02
# A lower rate gives too little reward for a few steps of learning; a higher one leaves too little to learn.
PASS_RATE_LIMITS = (0.12, 0.38)
# 512 prompts give 2048 samples, which determine a pass rate of 0.25 to 0.01.
PASS_RATE_SAMPLES_PER_PROMPT = 4
# Conversations with a tool in the warm-up; the others answer at once.
TOOL_SHARE = 0.25

Row = Mapping[str, Any]


def make_tiny_model(
    folder: Path,
    architecture: Architecture,
    train_rows: Sequence[Row],
    heldout_rows: Sequence[Row],
    seed: int,
    known: Vocabulary = DIGITS,
) -> float:
    """Make the model in `folder`.

    Args:
        folder: Destination; created complete or not at all.
        architecture: Dimensions, within the limits of `planner.made_model.check_made`.
        train_rows: Prompts and labels of the warm-up: {"prompt": messages, "label": text}. A batch has one length, so
            only the most frequent lengths are used. With "conversation" (`ToolUse.conversation`) it is the correct
            answer, and the label the other one.
        heldout_rows: Rows of the same form for measuring the pass rate; not used in the warm-up.
        seed: Seed of weights and warm-up.
        known: Vocabulary of the tokenizer.

    Returns:
        The sampled pass rate on `heldout_rows`, at temperature 1, of the saved weights.

    Raises:
        ConfigError: The architecture is not supported.
        RuntimeError: The pass rate is outside `PASS_RATE_LIMITS`.
    """
    raise_if_any([*check_made(architecture), *_check_vocabulary(architecture, known)])
    make = make_byte_level_tokenizer if has_sections(architecture) else make_tokenizer
    tokenizer = make(architecture.max_position_embeddings, known)
    config = config_json(architecture, known)
    with _reproducible(seed):
        model, mtp_layers = _initialize(config)
        draws = torch.Generator().manual_seed(seed)
        warm_up(model, _examples(tokenizer, train_rows), draws, is_task=known is not DIGITS)
        tensors = {
            **_hub_tensors(model, text_prefix=family_of(architecture).text_prefix),
            **_mtp_tensors(mtp_layers, architecture),
            **vision_tensors(config),
        }
        _round_to_saved(model)
        pass_rate = measure_pass_rate(model, _examples(tokenizer, heldout_rows), draws)
    log.info("sampled pass rate after the warm-up: %.3f", pass_rate)
    _check_pass_rate(pass_rate, seed)
    _write(folder, config, tokenizer, tensors)
    return pass_rate


def config_json(architecture: Architecture, known: Vocabulary = DIGITS) -> dict[str, Any]:
    """Return the content of `config.json`, with the family's own keys."""
    stops, dims = stop_token_ids(known), dimensions(architecture)
    if has_sections(architecture):
        own = {"eos_token_id": stops, "pad_token_id": stops[0], "initializer_range": INITIALIZER_RANGE}
        return hub_config(architecture, {**_published_values(architecture), **own})
    rope = {"rope_theta": dims.pop("rope_theta"), "rope_type": "default"}
    content = {
        "architectures": [family_of(architecture).hub_class],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": stops,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": stops[0],
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "use_cache": True,
        **dims,
    }
    if architecture.kv_lora_rank:
        content |= {
            "head_dim": architecture.qk_rope_head_dim,
            "indexer_rope_interleave": True,
            "moe_layer_freq": 1,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": architecture.num_attention_heads,
            "qk_head_dim": architecture.qk_nope_head_dim + architecture.qk_rope_head_dim,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
        }
    return dict(sorted(content.items()))


def _published_values(architecture: Architecture) -> dict[str, Any]:
    """Return the fixed values that published files of the family say."""
    told = ("attention_bias", "attn_output_gate", "hidden_act", "layer_types", "mamba_ssm_dtype")
    fixed = fixed_values(architecture)
    return {key: fixed[key] for key in (*told, "mtp_use_dedicated_embeddings")}


@torch.no_grad()
def measure_pass_rate(model: PreTrainedModel, examples: Examples, generator: torch.Generator) -> float:
    """Sample answers at temperature 1, and return the share of correct ones, including the end token.

    Args:
        model: Model to sample, with a key-value cache.
        examples: Prompts and, in `ascending`, the correct answers. What is read of them is not sampled.
        generator: Random generator.
    """
    is_read = torch.zeros(examples.ascending.shape[1]) if examples.is_read is None else examples.is_read[0]
    samples = PASS_RATE_SAMPLES_PER_PROMPT
    wanted = examples.ascending.repeat_interleave(samples, dim=0)
    right = torch.ones(len(wanted), dtype=torch.bool)
    output = model(input_ids=examples.prompts, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.reorder_cache(torch.arange(len(examples.prompts)).repeat_interleave(samples))
    logits = output.logits[:, -1].repeat_interleave(samples, dim=0)
    for position in range(wanted.shape[1]):
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        if is_read[position]:
            tokens = wanted[:, position : position + 1]
        right &= tokens[:, 0] == wanted[:, position]
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    return right.float().mean().item()


@contextlib.contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch and require deterministic kernels inside the block; restores both afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _initialize(config: Mapping[str, Any]) -> tuple[PreTrainedModel, nn.ModuleList]:
    """Return the random model, and the decoder layers for its MTP layers."""
    text, family = text_section(config), FAMILIES[config["model_type"]]
    num_layers = text["num_hidden_layers"]
    num_mtp = next((text[key] for key in MTP_COUNTS if key in text), 0)
    model_class = getattr(import_modelling(config["model_type"]), family.text_class)
    values = {**text, "num_hidden_layers": num_layers + num_mtp, "dtype": "float32"}
    if kinds := text.get("layer_types"):
        values["layer_types"] = [*kinds, *["full_attention"] * num_mtp]
    wide = model_class.config_class.from_dict(values)
    wide._attn_implementation = "eager"
    model = model_class(wide)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=ROUTER_BIAS_RANGE)
    mtp_layers = model.model.layers[num_layers:]
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if kinds:
        model.config.layer_types = kinds
    return model, mtp_layers


def _examples(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> Examples:
    def encode(text: str) -> list[int]:
        return [*tokenizer.encode(text), tokenizer.eos_token_id]

    prompts = tokenizer.apply_chat_template(
        [list(row["prompt"]) for row in rows], add_generation_prompt=True, return_dict=False
    )
    if "conversation" in rows[0]:
        return _tool_examples(torch.tensor(prompts), rows, encode)
    answers = [(encode(row["label"]), encode(backwards(row["label"]))) for row in rows]
    shapes = [tuple(map(len, (prompt, *both))) for prompt, both in zip(prompts, answers, strict=True)]
    shape = Counter(shapes).most_common(1)[0][0]
    taken = [(p, *both) for p, both, found in zip(prompts, answers, shapes, strict=True) if found == shape]
    if len(taken) < len(rows):
        log.info("%d of %d rows have the commonest lengths, and are taken", len(taken), len(rows))
    asked, right, other = (torch.tensor(column) for column in zip(*taken, strict=True))
    return Examples(asked, right, other)


def _tool_examples(prompts: torch.Tensor, rows: Sequence[Row], encode: Callable[[str], list[int]]) -> Examples:
    """Return conversations in which a tool is called, and the labels alone as the other answers."""
    parts = [[encode(part)[:-1] for part in row["conversation"]] for row in rows]
    called = [[token for part in of_row for token in part] for of_row in parts]
    length = len(called[0])
    told = [encode(row["label"]) for row in rows]
    padded = [answer + answer[-1:] * (length - len(answer)) for answer in told]
    call, observation, _ = map(len, parts[0])
    is_read = torch.zeros(2, length, dtype=torch.bool)
    is_read[0, call : call + observation] = True
    is_read[1, len(told[0]) :] = True
    return Examples(prompts, torch.tensor(called), torch.tensor(padded), TOOL_SHARE, is_read)


def _hub_tensors(module: nn.Module, prefix: str = "", text_prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Return a module's tensors under the Hub's names and in the saved precision.

    transformers stores all experts of a layer in one tensor; on the Hub each expert has three of its own. A tied output
    matrix is omitted.
    """
    shared = {"lm_head.weight"} if getattr(getattr(module, "config", None), "tie_word_embeddings", False) else set()
    tensors: dict[str, torch.Tensor] = {}
    for own_name, value in module.state_dict(prefix=prefix).items():
        name = f"{text_prefix}{own_name.removeprefix('model.')}" if own_name.startswith("model.") else own_name
        if name in shared:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(value):
                gate, up = gate_up.chunk(2)
                base = f"{name.removesuffix('gate_up_proj')}{expert}"
                tensors |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            tensors |= {f"{base}{expert}.down_proj.weight": down for expert, down in enumerate(value)}
        else:
            tensors[name] = value
    return {name: _saved_precision(name, tensor).contiguous() for name, tensor in tensors.items()}


def _mtp_tensors(layers: nn.ModuleList, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Return the MTP layers: a decoder layer each, and the tensors that join it to embedding and last hidden state."""
    tensors: dict[str, torch.Tensor] = {}
    apart = family_of(architecture).mtp_prefix
    for index, layer in enumerate(layers):
        if apart:
            randomize_norms(layer)
        prefix = f"{apart}layers.{index}." if apart else f"model.layers.{architecture.num_hidden_layers + index}."
        tensors |= _hub_tensors(layer, prefix)
        tensors |= joint_mtp_tensors(layer, apart) if apart else numbered_mtp_tensors(layer, prefix)
    return tensors


def _saved_precision(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if name.endswith(IN_FP32) else tensor.bfloat16()


@torch.no_grad()
def _round_to_saved(model: nn.Module) -> None:
    """Set the model in memory to the saved values."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(_saved_precision(name, tensor))


def _check_vocabulary(architecture: Architecture, known: Vocabulary) -> Iterator[Problem]:
    needed = len(known.texts) + len(CONTROL_TOKENS)
    if known is not DIGITS and architecture.vocab_size < needed:
        allowed = f"at least {needed}: the characters, common words and control tokens of the task"
        yield Problem(
            "vocabulary-too-small", "model.architecture.vocab_size", str(architecture.vocab_size), allowed, "raise it"
        )
    others = "".join(text for text in known.texts if not text.isascii())
    if others and has_sections(architecture):
        remedy = "choose another task, or another family for it"
        value = f"a task with the characters {others[:20]!r}, for {architecture.model_type}"
        yield Problem("vocabulary-not-ascii", "data.task", value, "characters of ASCII", remedy)


def _check_pass_rate(pass_rate: float, seed: int) -> None:
    low, high = PASS_RATE_LIMITS
    if not low <= pass_rate <= high:
        raise RuntimeError(
            f"the model made from seed {seed} has a sampled pass rate of {pass_rate:.3f} after its warm-up, not "
            f"between {low} and {high}: it would show nothing about learning. Choose another seed or architecture"
        )


def _write(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tensors: dict[str, torch.Tensor]
) -> None:
    with building(folder) as partial:
        for leftover in partial.iterdir():
            leftover.unlink()
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", _generation_config(config))
        tokenizer.save_pretrained(partial)
        _write_shards(partial, tensors)


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    config = text_section(config)
    return {
        "_from_model_config": False,
        "do_sample": True,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "temperature": 1.0,
        "top_p": 1.0,
    }


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=total_bytes // MIN_SHARDS)
    for name, members in split.filename_to_tensors.items():
        (folder / name).write_bytes(save({member: tensors[member] for member in members}, metadata={"format": "pt"}))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
    write_json(folder / "model.safetensors.index.json", index)
