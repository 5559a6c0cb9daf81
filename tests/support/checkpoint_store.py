"""A small store with a random checkpoint, and the command lines of the checkpoint steps on it."""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.support.killing import SCRIPTS
from tests.support.resolved_words import words_with
from tests.support.small_checkpoint import tokenizer, write_object
from tests.support.tiny_checkpoint import TINY, make_random_checkpoint

from posttrain.store import (
    Receipt,
    part_receipt_of,
    read_receipt,
    receipt_of,
    record_files,
    write_receipt,
)

NUM_PARTS = 2
DIMENSIONS = words_with(TINY)
STEPS = {
    "rollout_fp8": "quantize_rollout_fp8",
    "rollout_start": "quantize_rollout_start",
    "export_fp8": "quantize_export_fp8",
    "serving": "quantize_serving",
    "bf16": "cast_to_bf16",
}


@dataclass(frozen=True)
class Store:
    """Paths below one root, and what to pass to the scripts.

    Args:
        root: Everything lies below it.
    """

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "hf_patched"

    def folder(self, name: str) -> Path:
        return self.root / name

    def part(self, name: str, part: int) -> list[object]:
        """Return the arguments of one part of folder `name`."""
        folder = self.folder(name)
        return [
            *self._common(folder),
            "--part",
            part,
            "--num-parts",
            NUM_PARTS,
            "--receipt",
            part_receipt_of(folder, part),
        ]

    def finalize(self, name: str) -> list[object]:
        """Return the arguments of the last step of folder `name`."""
        folder = self.folder(name)
        receipts = [part_receipt_of(folder, part) for part in range(NUM_PARTS)]
        return [*self._common(folder), "--part-receipts", *receipts, "--receipt", receipt_of(folder)]

    def export(self, part: int, name: str = "hf") -> list[object]:
        """Return the arguments of one part of an export of the converted checkpoint."""
        trained, folder = self.folder("torch_dist"), self.folder(name)
        return [
            "--run-folder",
            trained,
            "--train-receipt",
            receipt_of(trained),
            *self._export_common(folder),
            "--part",
            part,
            "--num-parts",
            NUM_PARTS,
            "--receipt",
            part_receipt_of(folder, part),
            *DIMENSIONS,
        ]

    def finalize_export(self, name: str = "hf") -> list[object]:
        """Return the arguments of the last step of an export."""
        folder = self.folder(name)
        receipts = [part_receipt_of(folder, part) for part in range(NUM_PARTS)]
        return [*self._export_common(folder), "--part-receipts", *receipts, "--receipt", receipt_of(folder)]

    def _export_common(self, folder: Path) -> list[object]:
        return ["--source", self.source, "--source-receipt", receipt_of(self.source), "--folder", folder]

    def _common(self, folder: Path) -> list[object]:
        common = ["--source", self.source, "--source-receipt", receipt_of(self.source), "--folder", folder]
        return [*common, *DIMENSIONS, *(["--step", STEPS[folder.name]] if folder.name in STEPS else [])]


def run_here(script: str, arguments: Sequence[object]) -> None:
    """Run a script's `main` in this process; its errors are raised."""
    path = str(SCRIPTS / f"{script}.py")
    with mock.patch.object(sys, "argv", [path, *map(str, arguments)]):
        runpy.run_path(path, run_name="imported")["main"]()


def make_store(root: Path) -> Store:
    """Return a store that holds the source and its receipt."""
    store = Store(root)
    shutil.copytree(_source(), store.source)
    write_receipt(receipt_of(store.source), Receipt("patch_hf_config", record_files(store.source), {}, {}))
    return store


@functools.cache
def _source() -> Path:
    folder = Path(tempfile.mkdtemp()) / "hf_patched"
    make_random_checkpoint(folder)
    write_object(folder / "tokenizer.json", tokenizer())
    return folder


def make_torch_dist(store: Store) -> None:
    """Convert, whole."""
    for part in range(NUM_PARTS):
        run_here("convert_hf_to_torch_dist", store.part("torch_dist", part))
    run_here("finalize_torch_dist", store.finalize("torch_dist"))


def make_export(store: Store, name: str = "hf") -> None:
    """Export, whole."""
    for part in range(NUM_PARTS):
        run_here("export_hf", store.export(part, name))
    run_here("finalize_export_hf", store.finalize_export(name))


def make_rollout_fp8(store: Store) -> None:
    """Quantise, whole."""
    make_quantized(store, "rollout_fp8")


def make_quantized(store: Store, name: str) -> None:
    """Make a folder of the store in another number format, whole."""
    for part in range(NUM_PARTS):
        run_here("quantize", store.part(name, part))
    run_here("finalize_quantized", store.finalize(name))


def make_quantized_store(root: Path) -> Store:
    """Return a store whose source is quantised."""
    first = make_store(root / "first")
    make_rollout_fp8(first)
    store = Store(root)
    shutil.copytree(first.folder("rollout_fp8"), store.source)
    shutil.copy2(receipt_of(first.folder("rollout_fp8")), receipt_of(store.source))
    return store


def assert_same_folder(made: Path, expected: Path) -> None:
    """Compare two folders byte by byte, and their receipts."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in made.iterdir()) == names
    assert all((made / name).read_bytes() == (expected / name).read_bytes() for name in names)
    assert read_receipt(receipt_of(made)) == read_receipt(receipt_of(expected))
