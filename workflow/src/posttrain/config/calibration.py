"""The passes over conversations of an NVFP4 calibration (docs/checkpoints.md)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.data import Data
from posttrain.document import _doc

# Conversations included in the workflow, which need no network.
OWN_SETS = ("coding", "broad", "deep")
MADE = "made"


@dataclass(frozen=True)
class CalibrationPass:
    """Conversations of a calibration pass, under a name of its own; nothing of them is trained on."""

    kind: str = _doc(
        "made: a set of the workflow's own; files: on this machine; hub: a dataset repository (as `data.kind`)",
        "files",
        choices=(MADE, "files", "hub"),
    )
    made: str = _doc(
        "Which set, for kind=made: coding with tool calls, broad (many topics, several languages), or deep (long "
        "contexts)",
        "",
        choices=("", *OWN_SETS),
    )
    file: str = _doc("As `data.train_file`: a file, a pattern or, with kind=files, a folder", "")
    repo_id: str = _doc("Hub dataset repository, for kind=hub", "")
    revision: str = _doc("Pinned commit of it, 40 hex digits, quoted", "")
    subset: str = _doc("Subset (configuration) of the repository, with `split`", "")
    split: str = _doc("Split to read, in the place of `file`, for kind=hub", "")
    prompt_key: str = _doc("Where the conversation is, chat messages or a text: as `data.prompt_key`", "prompt")
    system_prompt: str = _doc("As `data.system_prompt`", "")
    num_samples: int = _doc(
        "Conversations that are read, the first that are long enough; 0 leaves the pass out", 512, minimum=0
    )
    min_tokens: int = _doc("Shorter conversations are passed over, in tokens", 0, minimum=0)
    max_tokens: int = _doc("Longer ones are cut here, in tokens, and at the model's positions", 4096, minimum=2)


def pass_data(wanted: CalibrationPass) -> Data:
    """Return a section `data` whose training prompts are the rows of a pass."""
    same = ("repo_id", "revision", "subset", "split", "prompt_key", "system_prompt")
    said = {key: getattr(wanted, key) for key in same}
    return Data(
        kind=wanted.kind, train_file=wanted.file, num_heldout_prompts=1, seed=0, reward="", duplicates="keep", **said
    )
