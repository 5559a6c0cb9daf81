"""The copy of a checkpoint that all later steps read: checked, complete, and in one form.

Weights are links, except shards with tensors in a form other than the family's published one (`resaved_weights`).
`config.json` and the tokenizer change only if necessary; `posttrain_patch.json` records each change.

The target "native" changes `config.json` only where loaders would go wrong: it removes `auto_map`, which requests the
repository's code, corrects a count of MTP layers that the weights lack, and adds keys that engines read elsewhere than
transformers. "deepseek_v32" renames the architecture to the alias under which stacks without `glm_moe_dsa` load the
same weights, and gives the tokenizer transformers 4's class and key. Source: TensorRT-LLM's guide to GLM-5, section
"Config modifications".
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.config_patch import PATCH_FILE, Change, apply_changes, write_patched
from posttrain.checkpoint.formats.config_sections import CONFIG, TEXT, keys_of_engines
from posttrain.checkpoint.formats.hf_config import ALIAS_CLASS, ALIAS_TYPE, lost_mtp_layers
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.resaved_weights import Forms, published_forms, published_specs, write_shard_again
from posttrain.checkpoint.formats.safetensors_io import INDEX_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.formats.shard_writer import write_index
from posttrain.checkpoint.formats.tied_copies import untying_changes
from posttrain.checkpoint.formats.tokenizer_files import (
    GENERIC_CLASS,
    converted_tokenizer,
    read_config,
    tokenizer_changes,
)
from posttrain.checkpoint.staging.file_placement import hard_link, remove_half_written, require_free_space
from posttrain.config.model_files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, read_model_files
from posttrain.config.schema import Architecture, Model
from posttrain.errors import CheckpointError
from posttrain.store import FileRecord, Receipt, place_atomic, record_file, write_atomic

log = logging.getLogger(__name__)
# Files that `model.tokenizer` and `model.chat_template` replace.
_TOKENIZER_FILES = ("tiktoken.model", "tokenizer.model", "vocab.", "merges.txt", "added_tokens", "special_tokens_map")
_TEMPLATE_FILES = ("chat_template.json", "additional_chat_templates/")


def changes_for(model: Model, source: Path) -> tuple[dict[str, list[Change]], dict[str, bytes]]:
    """Return the changes of a patched copy: JSON file -> changes, and whole files that it adds or replaces.

    Args:
        model: The model's section of the configuration.
        source: The checkpoint's folder.

    Raises:
        CheckpointError: The special tokens have a form without a counterpart, or a file is damaged.
        ConfigError: A file named by `model` is missing.
    """
    files = read_model_files(model)
    tokenizer = read_config(source, files)
    if (
        made := converted_tokenizer(source, tokenizer, model.architecture.vocab_size)
        if TOKENIZER not in files
        else None
    ):
        files[TOKENIZER] = made
    original = (source / TOKENIZER).read_bytes() if (source / TOKENIZER).exists() else None
    own = tokenizer_changes(tokenizer, files.get(TOKENIZER) or original, CHAT_TEMPLATE in files)
    if model.patch.target == ALIAS_TYPE:
        own = [*own, *_alias_tokenizer(apply_changes(tokenizer, own, TOKENIZER_CONFIG), source)]
    patch = {CONFIG: _config_changes(model, source)}
    if TOKENIZER_CONFIG not in files:
        patch[TOKENIZER_CONFIG] = own
    elif own:
        files[TOKENIZER_CONFIG] = _json_bytes(apply_changes(tokenizer, own, TOKENIZER_CONFIG))
    return {name: changes for name, changes in patch.items() if changes}, files


def _config_changes(model: Model, source: Path) -> list[Change]:
    config = read_object(source / CONFIG)
    changes = [Change("remove", "/auto_map", config["auto_map"], None)] if "auto_map" in config else []
    specs = published_specs(CheckpointReader(source).infos, model.architecture)
    for key, count in lost_mtp_layers(config, model.architecture, specs).items():
        log.warning("%s: %s is %r, and there is no MTP layer: the copy says 0", source, key, count)
        changes.append(Change("replace", f"/{key}", count, 0))
    text = config.get(TEXT, {})
    for key, value in keys_of_engines(model.architecture).items():
        if text.get(key) is None:
            log.warning("%s: %s has no %s: the copy says %r", source, TEXT, key, value)
            changes.append(Change("replace" if key in text else "add", f"/{TEXT}/{key}", None, value))
    return [*changes, *(_alias_config(config) if model.patch.target == ALIAS_TYPE else [])]


def alias_changes(folder: Path) -> dict[str, list[Change]]:
    """Return the target "deepseek_v32"'s changes of a loadable checkpoint: file -> changes.

    Raises:
        CheckpointError: The special tokens have a form without a counterpart, or a file is damaged.
    """
    tokenizer = _alias_tokenizer(read_config(folder, {}), folder)
    changes = {CONFIG: _alias_config(read_object(folder / CONFIG)), TOKENIZER_CONFIG: tokenizer}
    return {name: rows for name, rows in changes.items() if rows}


def _alias_config(config: Mapping[str, Any]) -> list[Change]:
    return [
        Change("replace", "/model_type", config.get("model_type"), ALIAS_TYPE),
        Change("replace", "/architectures", config.get("architectures"), [ALIAS_CLASS]),
    ]


def _alias_tokenizer(tokenizer: Mapping[str, Any], source: Path) -> list[Change]:
    changes = []
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        changes.append(Change("replace", "/tokenizer_class", "TokenizersBackend", GENERIC_CLASS))
    if "extra_special_tokens" in tokenizer:
        old, new = "extra_special_tokens", "additional_special_tokens"
        if not isinstance(tokenizer[old], list) or new in tokenizer:
            raise CheckpointError(
                "tokenizer-keys",
                f"{source / TOKENIZER_CONFIG}: {old} must be a list, and {new} absent, to be renamed; found "
                f"{type(tokenizer[old]).__name__}{' and both keys' if new in tokenizer else ''}",
            )
        changes.append(Change("rename", f"/{old}", old, new))
    return changes


def patch_folder(
    source: Path,
    destination: Path,
    model: Model,
    source_receipt: Receipt,
    dropped: Collection[str] = (),
    unties: bool = False,
) -> tuple[FileRecord, ...]:
    """Make the patched copy of a checkpoint.

    Args:
        source: The checkpoint; not changed.
        destination: The partial folder. Repeated calls write the same bytes.
        model: The model's section of the configuration.
        source_receipt: Records of the source's files; linked files keep their records.
        dropped: Tensors to omit; see `tied_copies`.
        unties: `config.json` declares the output matrix and the embedding untied.

    Returns:
        One record per file, sorted by path.

    Raises:
        CheckpointError: See `changes_for`.
        OSError: The disk is too small for the rewritten shards.
    """
    destination.mkdir(parents=True, exist_ok=True)
    remove_half_written(destination)
    patch, files = changes_for(model, source)
    if unties:
        patch.setdefault(CONFIG, []).extend(untying_changes(read_object(source / CONFIG)))
    forms = functools.partial(_forms, model.architecture, dropped)
    shards = _shards_to_write(source, forms)
    left_out = _left_out(model, source_receipt) | {*patch, *files, *shards, *([INDEX_NAME] if shards else [])}
    is_changed = bool(patch or files or shards)
    linked = [r for r in source_receipt.files if r.path not in left_out and not (is_changed and r.path == PATCH_FILE)]
    for record in linked:
        _link(source / record.path, record.path.below(destination))
    if not is_changed:
        return tuple(sorted(linked, key=lambda record: record.path))
    written, splits = _write_shards(source, destination, forms, shards)
    for name, content in files.items():
        write_atomic(destination / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
    patched = {name: apply_changes(read_object(source / name), patch[name], name) for name in patch}
    write_patched(destination, patched, {**patch, **_whole_files(source, files), **splits})
    names = (*patch, *files, PATCH_FILE, *([INDEX_NAME] if (destination / INDEX_NAME).exists() and shards else []))
    return tuple(sorted([*linked, *written, *(record_file(destination, n) for n in names)], key=lambda r: r.path))


def _left_out(model: Model, receipt: Receipt) -> set[str]:
    """Return the checkpoint's files that the user's tokenizer or template replaces as a group."""
    dropped = (*(_TOKENIZER_FILES if model.tokenizer else ()), *(_TEMPLATE_FILES if model.chat_template else ()))
    return {str(record.path) for record in receipt.files if dropped and record.path.startswith(dropped)}


def _whole_files(source: Path, files: Mapping[str, bytes]) -> dict[str, list[Change]]:
    def digest(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    before = {name: digest((source / name).read_bytes()) for name in files if (source / name).exists()}
    return {name: [Change("write", "", before.get(name), digest(content))] for name, content in files.items()}


def _forms(arch: Architecture, dropped: Collection[str], name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    return {} if name in dropped else published_forms(name, spec, arch)


def _shards_to_write(source: Path, forms_of: Forms) -> dict[str, list[Change]]:
    """Return the shards with tensors in another form than the copy's, and the changes in each."""
    reader, found = CheckpointReader(source), dict[str, list[Change]]()
    for name, info in reader.infos.items():
        forms = forms_of(name, info.spec)
        if forms != {name: info.spec}:
            first, spec = next(iter(forms.items()), ("", None))
            after = (
                "left out" if not forms else str(spec) if len(forms) == 1 else f"{len(forms)} from {first} on, {spec}"
            )
            found.setdefault(reader.file_of(name), []).append(Change("split", name, str(info.spec), after))
    return found


def _write_shards(
    source: Path, destination: Path, forms_of: Forms, shards: Mapping[str, list[Change]]
) -> tuple[list[FileRecord], Mapping[str, list[Change]]]:
    if not shards:
        return [], {}
    need = sum((source / name).stat().st_size for name in shards)
    log.warning("%s: %d shards hold tensors in another form; written again, %d bytes", source, len(shards), need)
    there = sum((destination / name).stat().st_size for name in shards if (destination / name).is_file())
    require_free_space(destination, need - there, "shards in the published form")
    reader = CheckpointReader(source)
    held = {stored: forms_of(stored, info.spec) for stored, info in reader.infos.items()}
    weight_map = {name: reader.file_of(stored) for stored, forms in held.items() for name in forms}
    if not weight_map:
        raise CheckpointError("only-copies", f"{source}: nothing but copies in it")
    # A shard without remaining tensors is not written.
    names = [name for name in shards if name in weight_map.values()]
    records = [write_shard_again(source / name, destination / name, forms_of) for name in names]
    if (source / INDEX_NAME).exists():
        write_index(destination, weight_map, {name: spec for forms in held.values() for name, spec in forms.items()})
    return records, shards


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n").encode()


def _link(source: Path, target: Path) -> None:
    """Link a file: a hard link, or a relative symlink if the file systems do not support it."""
    if hard_link(source, target):
        return
    where = os.path.relpath(source.resolve(strict=True), target.parent.resolve())
    if not (target.is_symlink() and os.readlink(target) == where):
        place_atomic(target, lambda temporary: os.symlink(where, temporary))
