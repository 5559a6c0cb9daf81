"""The three scripts of a download, run as the rules run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.killing import SCRIPTS

from posttrain.store import manifest_of, part_receipt_of, receipt_of

NEEDED = [
    "chat_template.jinja",
    "config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


def from_hub(repo_id: str, revision: str) -> list[object]:
    """Return what names a Hub repository as the source."""
    return ["--kind", "hub", "--repo-id", repo_id, "--revision", revision]


def from_folder(folder: Path) -> list[object]:
    """Return what names a folder as the source."""
    return ["--kind", "folder", "--source-folder", folder]


@dataclass
class StoreFolder:
    """A checkpoint's place in a store.

    Args:
        store: The store's folder.
        num_parts: Into how many jobs the download is split.
        environment: Of the scripts, on top of ours.
    """

    store: Path
    num_parts: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.store / "hf"

    def arguments(self, script: str, source: Sequence[object] = (), part: int = 0) -> list[object]:
        """Return a script's command line."""
        parts = [part_receipt_of(self.folder, number) for number in range(self.num_parts)]
        common = ["--folder", self.folder, "--manifest", manifest_of(self.folder)]
        if script == "list_hf_checkpoint":
            return [*common, *source]
        if script == "download_hf_checkpoint":
            return [*common, "--part", part, "--num-parts", self.num_parts, "--receipt", parts[part]]
        return [*common, "--part-receipts", *parts, "--receipt", receipt_of(self.folder)]

    def command(self, script: str, source: Sequence[object] = (), part: int = 0, more: Sequence[object] = ()) -> list:
        """Return a script's command."""
        words = [*self.arguments(script, source, part), *more]
        return [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, words)]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | self.environment

    def run(self, script: str, *source: object, part: int = 0, more: Sequence[object] = (), **options):
        """Run one script to its end."""
        command = self.command(script, source, part, more)
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, **options)

    def run_all(self, *source: object) -> subprocess.CompletedProcess:
        """Run the scripts one after the other, up to the first that fails; returns how the last one ended."""
        done = self.run("list_hf_checkpoint", *source)
        for part in range(self.num_parts):
            done = done if done.returncode else self.run("download_hf_checkpoint", part=part)
        return done if done.returncode else self.run("finalize_hf_checkpoint")
