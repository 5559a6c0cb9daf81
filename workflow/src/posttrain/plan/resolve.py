"""Resolves a configuration: merges and checks layers, chooses a missing layout, and keeps a started run's form.

`config` cannot import the planner, which depends on it: `config.load.merge` takes the layout choice as a function. If
the planner registered itself on import, the result would depend on the imported modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config.legacy_runs import as_begun
from posttrain.config.load import Resolved, merge
from posttrain.plan.sizing.layout_choice import choose_layout
from posttrain.plan.step_choice import choose_step
from posttrain.store.source_run import with_pinned_source


def resolve(workflow: Mapping[str, Any], config_dir: Path) -> Resolved:
    """Resolve a configuration; without a recipe, the planner chooses the layout.

    A run that an older version started keeps its form.

    Args:
        workflow: `config/workflow.yaml` with the user's `--config` on top.
        config_dir: The folder `config/`.

    Raises:
        ConfigError: Lists every problem; see `config.load.merge`, and `store.source_run`.
    """
    return as_begun(with_pinned_source(merge(workflow, config_dir, choose_layout, choose_step)))
