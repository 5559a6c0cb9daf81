"""The record of a rehearsal, and whether it is of the current code and configuration."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import posttrain
from posttrain.config.load import Resolved, digest8
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.readable import counted
from posttrain.store import Paths, hash_file, read_json


def file_of(paths: Paths) -> Path:
    """Return the path of a rehearsal's JSON file, which is next to the plan and to the rehearsal's HTML page."""
    return paths.plan.with_suffix(".rehearsal.json")


def digest(resolved: Resolved) -> str:
    """Return a digest of all inputs of a rehearsal: code, Megatron's version and configuration."""
    code, root = hashlib.sha256(version("megatron-core").encode()), Path(posttrain.__file__).parents[1]
    for path in sorted(root.glob("posttrain*/**/*.py")):
        code.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest8([asdict(resolved.config), code.hexdigest()])


def lengths_digest(file: str) -> str:
    """Return a hash of a file of lengths; "" if no file is named or it no longer exists."""
    return hash_file(Path(file)) if file and Path(file).is_file() else ""


def describe_rehearsal(paths: Paths) -> dict[str, str]:
    """Return whether this code and configuration have been rehearsed.

    Returns:
        "state": a few words, which the dry run adds to its line about the rule `train`; "words": a sentence with the
        recommended action; "page": the file name of the rehearsal's HTML page, "" if there is none.
    """
    file = file_of(paths)
    if paths.resolved.config.hardware.device != "cuda":
        return _described("nothing to rehearse", "nothing to rehearse without GPUs")
    if not paths.resolved.config.hardware.compute_capability:
        return _described("not to be rehearsed", "none: only GPUs of NVIDIA's can be rehearsed")
    if not file.exists():
        words = "none yet; `posttrain rehearse` runs two steps of the trainer without a GPU"
        return _described("not rehearsed", words)
    page = file.with_suffix(".html").name
    try:
        known = read_json(file)
        num_problems, assumed = len(known["problems"]), known["assumed"]
        is_current = known["digest"] == digest(paths.resolved)
        is_current &= assumed["lengths_digest"] == lengths_digest(assumed["lengths"])
        is_whole = (known["layers"], len(known["stages"])) == (known["of_layers"], known["of_stages"])
        quickly = "" if is_whole else ", with quick=1"
        lengths, imbalance = assumed["lengths"], assumed["expert_imbalance"]
        quickly += f", lengths of {lengths}" if lengths else ""
        quickly += f", expert_imbalance={imbalance:g}" if imbalance != ASSUMPTIONS.expert_imbalance else ""
    except (OSError, ValueError, KeyError, TypeError):
        return _described("not rehearsed", f"{file.name} cannot be read; `posttrain rehearse` makes it anew")
    if not is_current:
        words = f"{page}, of another code, configuration or file of lengths; `posttrain rehearse` makes it anew"
        return _described("rehearsed otherwise", words, page)
    found = f"{counted(num_problems, 'problem')} found" if num_problems else ""
    words = f"{page}, of exactly this code and configuration{quickly}: {found or 'ran through'}"
    return _described(f"rehearsed: {found}" if found else "rehearsed", words, page)


def _described(state: str, words: str, page: str = "") -> dict[str, str]:
    return {"state": state, "words": words, "page": page}
