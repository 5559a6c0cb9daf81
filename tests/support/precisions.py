"""A random checkpoint and what quantising made of it, and engines asked of both by the real step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.evaluation_inputs import ROOT, make_inputs
from tests.support.folders_in_parts import make_folder
from tests.support.forked_programs import run_program

from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.store import Receipt, receipt_of, record_files, write_receipt

# Twenty prompts that nobody answers rightly bound a loss to 16 points.
OVERRIDES = (
    "evaluation.num_samples_per_prompt=2 rollout.max_response_tokens=6 engine.num_threads=1 "
    "evaluation.deployment.num_samples=5 evaluation.deployment.max_kl=1000 evaluation.deployment.max_loss_points=50"
)


def make_checkpoints(folder: Path) -> list[object]:
    """Write `hf` and `nvfp4` with all that steps need; return the words that tell the configuration and the dataset."""
    words = make_inputs(folder, OVERRIDES)
    make_folder(RecodedFolder(Quantization(folder / "hf", {"format": "nvfp4"}), "s1"), folder / "nvfp4")
    receipt = Receipt("finalize_serving", record_files(folder / "nvfp4"), {}, {})
    write_receipt(receipt_of(folder / "nvfp4"), receipt)
    return [*words[:2], *words[-2:], "--dataset-receipt", receipt_of(folder / "dataset")]


def said_by(folder: Path, precision: str) -> Path:
    """Return where it stands what engines of a precision said, below the folder."""
    return folder / "precisions" / f"{precision}.json"


def ask(
    folder: Path, words: list[object], precision: str, checkpoint: Path, around: Sequence[object] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the step for a precision; all but the original's are told what that said."""
    return run_script("ask_precision", words_of(folder, words, precision, checkpoint), around)


def words_of(folder: Path, words: list[object], precision: str, checkpoint: Path) -> list[object]:
    """Return the words of the step."""
    more = [] if precision == "original" else ["--original", said_by(folder, "original")]
    words = [*words, "--checkpoint", checkpoint, "--checkpoint-receipt", receipt_of(checkpoint), *more]
    return [*words, "--precision", precision, "--output", said_by(folder, precision)]


def run_script(name: str, words: list[object], around: Sequence[object] = ()) -> subprocess.CompletedProcess[str]:
    """Run a step to its end, behind what starts engines for it, if anything does."""
    if not around:
        return run_program(ROOT / "scripts" / f"{name}.py", *words)
    command = [*around, sys.executable, ROOT / "scripts" / f"{name}.py", *words]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
