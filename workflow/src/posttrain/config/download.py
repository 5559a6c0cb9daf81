"""The section `download` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Download:
    """Download of the model's files and of the dataset."""

    num_parts: int = _doc("Independent jobs that download the model's files", 1, minimum=1)
    num_workers: int = _doc("Concurrent downloads per job", 8, minimum=1)
    num_retries: int = _doc(
        "Retries before a busy server or a broken connection ends the job; a retry that receives data resets the count",
        8,
        minimum=0,
    )
    xet: bool = _doc(
        "Download with the Hub's library, which uses Xet if the repository does; a file interrupted by a "
        "kill then starts over, while plain HTTP resumes at the byte",
        False,
    )
    torch_dist_folder: str = _doc(
        "Existing torch_dist checkpoint of the model, used instead of a conversion after it was compared "
        "with the source",
        "",
    )
