"""The route files of a rollout's samples; without torch, because drivers also read rollouts."""

from __future__ import annotations

import numpy as np

from posttrain.errors import CheckpointError
from posttrain.types import Routes


def open_routes(routes: Routes) -> np.memmap:
    """Memory-map a sample's routes [layers, tokens, K].

    Raises:
        CheckpointError: The file is missing or truncated.
    """
    try:
        return np.memmap(routes.file, routes.dtype, "r", routes.offset, routes.shape)
    except (OSError, ValueError) as error:
        raise CheckpointError("routes-invalid", f"{routes.file}: {error}") from error
