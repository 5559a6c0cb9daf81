"""The configuration as a whole: layers merged and checked, a layout where no file gives one, a begun run as it began.

`config` cannot import the planner, which is built on it: `config.load.merge` takes the choice of a layout as a
function. A planner that registered itself on import would make the result depend on what was imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config.legacy_runs import as_begun
from posttrain.config.load import Resolved, merge
from posttrain.plan.sizing.layout_choice import choose_layout
from posttrain.store.source_run import with_pinned_source


def resolve(workflow: Mapping[str, Any], config_dir: Path) -> Resolved:
    """Resolve a configuration; where no recipe names a layout, the planner chooses it.

    A run that an older version began goes on as it began.

    Args:
        workflow: `config/workflow.yaml` with the user's `--config` on top.
        config_dir: The folder `config/`.

    Raises:
        ConfigError: With every problem found; see `config.load.merge`, and `store.source_run`.
    """
    return as_begun(with_pinned_source(merge(workflow, config_dir, choose_layout)))
