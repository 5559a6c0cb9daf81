"""Every path of a run, the receipt that proves a step done, and durable writes.

A step is done when its receipt exists. The receipt is written last: the data is on disk (fsync), the receipt is on disk
under a temporary name, one rename makes it visible, and the folder that holds it is synced. So a kill or a power cut
leaves either no receipt or a true one.

A folder is built under `{name}.partial`, where a later attempt finds what an earlier one finished, and gets its final
name when it is complete. A receipt is deterministic: it names files with sizes and content hashes, the digests of the
receipts it was made from, and the settings that matter. Times, host and attempts go into a log file beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from posttrain import __version__
from posttrain.config.families import dimensions
from posttrain.config.load import Resolved, digest8
from posttrain.errors import CheckpointError

log = logging.getLogger(__name__)

# Raised by one when a step writes something else than before for the same input: its receipts are then remade.
FORMAT_VERSIONS: Mapping[str, int] = {
    "make_tiny_model": 1,
    "download_hf_checkpoint": 1,
    "download_dataset": 1,
    "patch_hf_config": 1,
    "convert_hf_to_torch_dist": 1,
    "finalize_torch_dist": 1,
    "quantize_rollout_fp8": 1,
    "finalize_rollout_fp8": 1,
    "quantize_nvfp4": 1,
    "stage_to_node_local": 1,
    "train_grpo": 1,
    "export_hf": 1,
    "evaluate": 1,
}
HASH_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Paths:
    """Where everything of one resolved run lies.

    Args:
        resolved: The configuration of the run.
    """

    resolved: Resolved

    # ---- the store: made once per model, revision and setting, shared by runs ----

    @property
    def store(self) -> Path:
        """Root of what does not depend on a run."""
        return Path(self.resolved.config.site.store)

    @property
    def revision12(self) -> str:
        """First 12 characters of the source's identity: the pinned commit, or a digest for other kinds of source."""
        model = self.resolved.config.model
        if model.source.kind == "hub":
            return model.source.revision[:12]
        if model.source.kind == "folder":
            return f"folder{digest8(os.path.abspath(model.source.folder))[:6]}"
        return f"made{digest8(self._made_from())}"

    @property
    def model_root(self) -> Path:
        """All checkpoint states of one model revision."""
        return self.store / self.resolved.config.model.name / self.revision12

    @property
    def made_model(self) -> Path:
        """The model that make_tiny_model makes, in the layout of a Hub repository."""
        return self.store / "made" / f"{self.resolved.config.model.name}-{digest8(self._made_from())}"

    @property
    def hf(self) -> Path:
        """The model's files as the source has them."""
        return self.model_root / "hf"

    @property
    def hf_patched(self) -> Path:
        """The same with the config patch applied; weights are links."""
        return self.model_root / f"hf_patched-{digest8(self._patch_settings())}"

    @property
    def torch_dist(self) -> Path:
        """Megatron's distributed checkpoint."""
        return self.model_root / f"torch_dist-{digest8(self._convert_settings())}"

    @property
    def rollout_fp8(self) -> Path:
        """FP8 weights for the engines."""
        return self.model_root / f"rollout_fp8-{digest8(self._quantize_settings())}"

    @property
    def rollout_nvfp4(self) -> Path:
        """NVFP4 expert weights for serving."""
        return self.model_root / f"rollout_nvfp4-{digest8(self._quantize_settings())}"

    @property
    def rollout_weights(self) -> Path:
        """What the engines load first: FP8, or the patched checkpoint itself."""
        return self.rollout_fp8 if self.resolved.config.rollout.fp8 else self.hf_patched

    @property
    def dataset(self) -> Path:
        """Prompts, one JSON line each, in `train.jsonl` and `heldout.jsonl`."""
        data = dataclasses.asdict(self.resolved.config.data)
        return self.store / "datasets" / f"{data['kind']}-{digest8(data)}"

    # ---- the run ----

    @property
    def run(self) -> Path:
        """Root of the run's results."""
        return Path(self.resolved.config.site.results) / self.resolved.run

    @property
    def experiment(self) -> Path:
        """What is learned: training's only config input."""
        return self.run / "experiment.yaml"

    @property
    def config(self) -> Path:
        """All values with their origin."""
        return self.run / "config.resolved.yaml"

    @property
    def train(self) -> Path:
        """The training run's folder: checkpoints, rollouts, metrics, attempts."""
        return self.run / "train"

    @property
    def train_done(self) -> Path:
        """Written when the last step's checkpoint is committed."""
        return self.train / "done.json"

    @property
    def hf_export(self) -> Path:
        """The trained model in Hub layout."""
        return self.run / "hf"

    def evaluation(self, when: str) -> Path:
        """Return the result of an evaluation; `when` is "before" or "after"."""
        return self.run / "evaluation" / f"{when}.json"

    def node_local_testimony(self, node: str) -> Path:
        """Return the record that says what a node's own disk holds."""
        return self.run / "node_local" / f"{node}.json"

    def node_local(self, node: str) -> Path:
        """Return the folder on a node's own disk that mirrors this model's root."""
        site = self.resolved.config.site
        return Path(site.node_local) / node / self.resolved.config.model.name / self.revision12

    # ---- logs: one folder per rule ----

    def store_log(self, rule: str, suffix: str = "") -> Path:
        """Return the log of a step in the store."""
        return Path("logs") / rule / f"{self.resolved.config.model.name}-{self.revision12}{suffix}.log"

    def run_log(self, rule: str, suffix: str = "") -> Path:
        """Return the log of a step of the run."""
        return Path("logs") / rule / f"{self.resolved.run}{suffix}.log"

    # ---- the settings that give an artefact its name ----

    def _made_from(self) -> dict[str, Any]:
        config = self.resolved.config
        return {
            "format": FORMAT_VERSIONS["make_tiny_model"],
            "architecture": dimensions(config.model.architecture),
            "num_digits": config.data.num_digits,
        }

    def _patch_settings(self) -> dict[str, Any]:
        patch = dataclasses.asdict(self.resolved.config.model.patch)
        return {"format": FORMAT_VERSIONS["patch_hf_config"], "patch": patch}

    def _convert_settings(self) -> dict[str, Any]:
        versions = [FORMAT_VERSIONS[step] for step in ("convert_hf_to_torch_dist", "finalize_torch_dist")]
        return {"format": versions, "patched": self._patch_settings()}

    def _quantize_settings(self) -> dict[str, Any]:
        versions = [FORMAT_VERSIONS[step] for step in ("quantize_rollout_fp8", "finalize_rollout_fp8")]
        return {"format": versions, "patched": self._patch_settings(), "strategy": "block128"}


def receipt_of(folder: Path) -> Path:
    """Return the receipt that stands beside a folder: `hf` -> `hf.receipt.json`."""
    return folder.with_name(folder.name + ".receipt.json")


def part_receipt_of(folder: Path, part: int | str) -> Path:
    """Return the receipt of one independent part of a folder's content."""
    return folder.with_name(f"{folder.name}.parts") / f"{part}.receipt.json"


def partial_of(folder: Path) -> Path:
    """Return the name under which a folder is built."""
    return folder.with_name(folder.name + ".partial")


# ---- receipts ----


@dataclass(frozen=True)
class FileRecord:
    """One file of an artefact.

    Args:
        path: Relative to the artefact's folder, with "/".
        size_bytes: Its length.
        xxh3_128: Hash of its content, 32 hex digits.
        sha256: The Hub's hash of it, where the Hub gives one; checked when the file was fetched.
    """

    path: str
    size_bytes: int
    xxh3_128: str
    sha256: str = ""


@dataclass(frozen=True)
class Receipt:
    """What a finished step made, from what, and with which settings.

    Args:
        step: Name of the rule.
        files: What it wrote, sorted by path.
        inputs: Name -> digest of the receipt it was made from.
        settings: What else decides the content.
    """

    step: str
    files: tuple[FileRecord, ...]
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the receipt's content: equal digests mean equal bytes made in the same way."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size_bytes for record in self.files)

    def _content(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "format_version": FORMAT_VERSIONS[self.step],
            "files": [dataclasses.asdict(record) for record in sorted(self.files, key=lambda r: r.path)],
            "inputs": dict(self.inputs),
            "settings": dict(self.settings),
        }


def write_receipt(path: Path, receipt: Receipt, started: float | None = None) -> None:
    """Make a step count as done. Call it last, after the data is on disk.

    Args:
        path: See `receipt_of`.
        receipt: What was made.
        started: `time.time()` at the start of the step; goes into the log beside the receipt, not into the receipt.
    """
    seconds = None if started is None else round(time.time() - started, 3)
    history = {
        "step": receipt.step,
        "finished_unix": round(time.time(), 3),
        "seconds": seconds,
        "host": socket.gethostname(),
        "posttrain": __version__,
        "bytes": receipt.size_bytes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    log_path = path.with_name(path.name.removesuffix(".receipt.json").removesuffix(".json") + ".history.jsonl")
    append_json_line(log_path, history)
    write_json(path, {**receipt._content(), "digest": receipt.digest})


def read_receipt(path: Path) -> Receipt:
    """Read a receipt and check that nobody changed it.

    Raises:
        CheckpointError: When it is missing, unreadable, or its digest does not fit its content.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(FileRecord(**record) for record in row["files"])
        receipt = Receipt(row["step"], files, row["inputs"], row["settings"])
        version, digest = row["format_version"], row["digest"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such receipt; the step before has not finished") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a receipt ({error}); delete it and run again") from error
    if version != FORMAT_VERSIONS.get(receipt.step) or digest != receipt.digest:
        raise CheckpointError(
            f"{path}: written by another version or changed by hand (format {version}, digest {digest[:12]}, "
            f"computed {receipt.digest[:12]}); delete it and run again"
        )
    return receipt


def record_file(folder: Path, name: str, sha256: str = "") -> FileRecord:
    """Read a file of `folder` and return its record."""
    path = folder / name
    return FileRecord(name, path.stat().st_size, hash_file(path), sha256)


def record_files(folder: Path, names: Iterable[str] | None = None) -> tuple[FileRecord, ...]:
    """Return the records of `names`, by default of all regular files below `folder`, sorted by path."""
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(record_file(folder, name) for name in sorted(names))


def check_files(folder: Path, receipt: Receipt, content: bool = False) -> list[str]:
    """Compare a folder with its receipt.

    Args:
        folder: The artefact.
        receipt: What it should hold.
        content: Also read every byte and compare the hashes.

    Returns:
        One line per file that is missing, of another size or of other content; empty when all is well.
    """
    found = []
    for record in receipt.files:
        path = folder / record.path
        if not path.is_file():
            found.append(f"{path}: missing, expected {record.size_bytes} bytes")
        elif path.stat().st_size != record.size_bytes:
            found.append(f"{path}: {path.stat().st_size} bytes, expected {record.size_bytes}")
        elif content and hash_file(path) != record.xxh3_128:
            found.append(f"{path}: content differs from its receipt (xxh3_128 {record.xxh3_128})")
    return found


def require_files(folder: Path, receipt_path: Path, content: bool = False) -> Receipt:
    """Return the receipt of `folder` after `check_files`.

    Raises:
        CheckpointError: Listing every file that is not as the receipt says, and what to do.
    """
    receipt = read_receipt(receipt_path)
    if found := check_files(folder, receipt, content):
        listed = "\n  ".join(found)
        raise CheckpointError(
            f"{folder} is not what its receipt says:\n  {listed}\n  remedy: rm {receipt_path} and run again"
        )
    return receipt


# ---- durable writes ----


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Build `folder` under its `.partial` name; it gets its own name when the block ends without an error.

    What an earlier attempt left there is kept for the step to check and use. A finished folder without a receipt (its
    step must run again) becomes the partial one. No attempt leaves both; where two writers did, the finished folder is
    the better start.

    Raises:
        RuntimeError: When somebody else finished the folder meanwhile; theirs stays.
    """
    partial = partial_of(folder)
    if folder.exists():
        if partial.exists():
            log.warning("removing %s: %s is complete, and only a second writer can have left both", partial, folder)
            shutil.rmtree(partial)
        folder.rename(partial)
    partial.mkdir(parents=True, exist_ok=True)
    yield partial
    sync_tree(partial)
    try:
        partial.rename(folder)
    except OSError as error:
        raise RuntimeError(
            f"{folder}: another process finished it while this one did; run again to check it"
        ) from error
    sync_folder(folder.parent)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then put it under its name: old content or new, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_temporaries(path)
    temporary = path.with_name(f"{_temporary_prefix(path)}{os.getpid()}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file durably."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def write_json(path: Path, content: Any) -> None:
    """Write JSON durably, one key per line, keys in the given order."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log of JSON lines durably; what a power cut left of an unfinished last line is cut off first."""
    with open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    _sync(folder)


def sync_tree(folder: Path) -> None:
    """Make all files below `folder`, and their names, survive a power cut."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                _sync(Path(parent, name))
        _sync(Path(parent))


def hash_file(path: Path) -> str:
    """Return the xxh3_128 of a file's content, 32 hex digits."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."


def _remove_dead_temporaries(path: Path) -> None:
    """Delete what processes of this host that were killed while writing `path` have left beside it."""
    prefix = _temporary_prefix(path)
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        pid = leftover.name.removeprefix(prefix).removesuffix(".tmp")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            leftover.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
