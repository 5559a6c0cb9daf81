"""The section `site.container`: the image that a gang's processes start in, where a scheduler starts them by `srun`."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.document import _doc


@dataclass(frozen=True)
class Container:
    """The image that a gang's processes start in, behind `srun`."""

    runtime: str = _doc(
        "none: the environment of the nodes themselves; apptainer: `apptainer exec`; pyxis: srun's `--container-image`",
        "none",
        choices=("none", "apptainer", "pyxis"),
    )
    image: str = _doc(
        "The image as one file that every node sees: `.sif` for apptainer, `.sqsh` for pyxis. `python` on its PATH has "
        "what the trainer needs (envs/gpu)",
        "",
    )
    mounts: list[str] = _doc(
        "Further folders to show inside: `/folder`, `/outside:/inside` or `/outside:/inside:ro`. The workflow's own "
        "folders are always there",
        [],
    )
    options: list[str] = _doc("Further words for `apptainer exec`, or for srun with pyxis", [])
