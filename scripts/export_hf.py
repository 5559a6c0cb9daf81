"""Writes one part of the trained model in Hub layout from a distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.export import (
    STEP,
    HubExport,
    checkpoint_of,
    identify_checkpoint,
    open_trained,
    refuse_foreign_folder,
)
from posttrain.checkpoint.formats.tied_copies import KEEP
from posttrain.checkpoint.parts.steps import PART, SOURCE, make_part, source_of
from posttrain.cli import RESOLVED, command_line, run
from posttrain.store import require_files


def main() -> None:
    """Check the inputs, write this part's shards and its receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **PART,
        run_folder=(Path, "a training's folder, or a checkpoint"),
        train_receipt={"type": Path, "help": "its receipt (done.json); another trainer's has none"},
        resolved=RESOLVED,
    )
    refuse_foreign_folder(args.folder)
    checkpoint, identity = find_trained(args.run_folder, args.train_receipt)
    inputs = {"train": identity, **source_of(args, "hf_patched")}

    def open_export() -> HubExport:
        model = args.resolved.config.model
        trained = open_trained(checkpoint, args.source, model.architecture, model.patch.copies == KEEP)
        return HubExport(trained.origin, inputs, trained)

    make_part(STEP, args, inputs, open_export)


def find_trained(run_folder: Path, receipt: Path | None) -> tuple[Path, str]:
    """Return the trained checkpoint and its identity; another trainer's has no receipt."""
    if receipt is None:
        return run_folder, identify_checkpoint(run_folder)
    train = require_files(run_folder, receipt)
    return checkpoint_of(run_folder, train), train.digest


if __name__ == "__main__":
    run(main)
