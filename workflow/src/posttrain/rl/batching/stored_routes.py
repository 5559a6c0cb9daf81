"""The files in which the routes of a rollout's samples lie; without torch, as drivers look at rollouts too."""

from __future__ import annotations

import numpy as np

from posttrain.errors import CheckpointError
from posttrain.types import Routes


def open_routes(routes: Routes) -> np.memmap:
    """Return a sample's routes [layers, tokens, K], of which only what is looked at is read.

    Raises:
        CheckpointError: The file is not there, or is shorter than it was.
    """
    try:
        return np.memmap(routes.file, routes.dtype, "r", routes.offset, routes.shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{routes.file}: {error}") from error
