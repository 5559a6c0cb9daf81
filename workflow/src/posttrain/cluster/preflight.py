"""The preflight without training: it inspects all nodes of a job, including spare ones.

It drops unfit nodes and repeats the preflight with the others until all of them are fit, because one node's fault can
hide another's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import store
from posttrain.cluster.inspection import FILE_NAME, KV_TRANSFER, LINKS, UnfitNodesError
from posttrain.cluster.node_group import AttemptFailedError, NodeGroup
from posttrain.cluster.nodes import Allocation
from posttrain.config.derived import nodes_with_spares
from posttrain.config.load import dump_resolved
from posttrain.errors import Problem
from posttrain.plan.preflight.judgement import Unfit, summarize
from posttrain.plan.preflight.report import Finding, ok
from posttrain.store import Paths


@dataclass(frozen=True)
class Preflight:
    """Result of a preflight.

    Args:
        fit: Nodes that are fit to train.
        unfit: Unfit node -> reasons.
        figures: Measurements of the fit nodes, as in training's `preflight.json`.
    """

    fit: list[str]
    unfit: Unfit
    figures: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return {"fit": self.fit, "unfit": self.unfit, **self.figures}

    def findings(self) -> list[Finding]:
        """Return one finding per node."""
        fit = [ok(name, summarize(*self._figures_of(name))) for name in self.fit]
        return [*fit, *(_unfit_finding(name, reasons) for name, reasons in self.unfit.items())]

    def _figures_of(self, name: str) -> list[dict[str, Any]]:
        parts = [self.figures.get(part, {}) for part in ("nodes", LINKS, KV_TRANSFER)]
        return [{name: part[name]} if part else {} for part in parts]


def look_at_nodes(paths: Paths, nodes: Allocation) -> Preflight:
    """Run the preflight on all nodes of a job, and write its result.

    Args:
        paths: Paths of the run, which need not exist yet.
        nodes: Allocation of this process's job.

    Raises:
        RuntimeError: The preflight itself failed.
    """
    names, unfit = nodes.choose(nodes_with_spares(paths.resolved.config)), Unfit()
    figures: dict[str, Any] = {}
    while names:
        found, figures = _look(paths, nodes, names)
        unfit |= found
        names = [name for name in names if name not in found]
        if not found:
            break
    preflight = Preflight(names, unfit, figures)
    store.write_json(paths.preflight, preflight.as_dict())
    return preflight


def _look(paths: Paths, nodes: Allocation, names: list[str]) -> tuple[Unfit, dict[str, Any]]:
    """Return the unfit nodes and the measurements."""
    folder = store.make_next_folder(paths.preflight.with_suffix(""))
    # A copy, because a run keeps the configuration with which it began.
    config_path = folder / paths.config.name
    store.write_text(config_path, dump_resolved(paths.resolved))
    unfit: Unfit = {}
    try:
        with NodeGroup(paths.resolved.config, nodes, names, folder) as group:
            group.form_group()
            group.inspect(config_path, paths.node_local("{node}"))
    except UnfitNodesError as error:
        unfit = error.unfit
    except AttemptFailedError as failure:
        if not failure.suspects:
            raise
        unfit = {name: [f"{failure}; see {folder}"] for name in failure.suspects}
    return unfit, _figures(folder)


def _figures(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _unfit_finding(name: str, reasons: list[str]) -> Finding:
    said = ", ".join(reasons)
    return Finding(name, said, Problem("node-unfit", name, said, "fit to train", "repair it, or exclude it"))
