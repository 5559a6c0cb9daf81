from functools import cache
from pathlib import Path

import pytest

from posttrain.planner.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"


@pytest.fixture(scope="session")
def resolved():
    """Return resolve(model, **more of the workflow's configuration)."""

    return resolve_model


@cache
def resolve_model(model, **more):
    return resolve({"model": model, "site": "local", **more}, CONFIG_DIR)
