"""The section `download` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Download:
    """How the model's files and the dataset are fetched."""

    num_parts: int = _doc("Independent jobs that fetch the model's files", 1, minimum=1)
    num_workers: int = _doc("Files that a job fetches at a time", 8, minimum=1)
    num_retries: int = _doc(
        "Attempts after the first one, before a server that is busy or a connection that breaks ends the job; those "
        "between which bytes arrive do not count",
        8,
        minimum=0,
    )
    xet: bool = _doc(
        "Leave the transfer to the library, which uses Xet where the repository does; a file that a killed job has "
        "begun is then fetched anew, where plain HTTP goes on at the byte",
        False,
    )
    torch_dist_folder: str = _doc(
        "An existing torch_dist checkpoint of the model, adopted in place of a conversion after it is proven equal", ""
    )
