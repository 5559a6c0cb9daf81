"""Write a run's two config files, experiment.yaml (what is learned) and config.resolved.yaml (everything).

It also registers the run as a user of its checkpoints in the store.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.load import dump_resolved, dump_yaml
from posttrain.store import Paths, write_text
from posttrain.store.references import register_run


def main() -> None:
    """Write the files that changed."""
    arguments = command_line(
        __doc__,
        resolved=RESOLVED,
        experiment=(Path, "experiment.yaml to write"),
        config=(Path, "config.resolved.yaml to write"),
    )
    resolved = arguments.resolved
    paths = Paths(resolved)
    write_if_changed(arguments.experiment, dump_yaml(resolved.experiment))
    write_if_changed(arguments.config, dump_resolved(resolved))
    register_run(paths)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it already contains `text`, so that its time does not trigger its readers again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


if __name__ == "__main__":
    run(main)
