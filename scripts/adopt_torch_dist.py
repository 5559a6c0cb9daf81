"""Adopt an existing Megatron torch_dist checkpoint after comparing it with the source bit by bit."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.formats.adopted_torch_dist import check_adoptable, place_torch_dist
from posttrain.checkpoint.formats.torch_dist import verify_torch_dist
from posttrain.checkpoint.parts.steps import FOLDER, SOURCE, make_folder, source_of
from posttrain.cli import RESOLVED, command_line, run
from posttrain.store import FileRecord, Receipt

STEP = "adopt_torch_dist"


def main() -> None:
    """Check names and shapes, link or copy the files, compare every tensor with the source, write the receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **FOLDER,
        adopted=(Path, "the torch_dist folder; never written to"),
        resolved=RESOLVED,
        threads={"type": int, "default": 1, "help": "files and tensors handled at a time"},
    )
    import torch

    torch.set_num_threads(1)

    def adopt(partial: Path) -> tuple[FileRecord, ...]:
        names = check_adoptable(args.adopted, args.resolved.config.model.architecture)
        files = place_torch_dist(args.adopted, partial, names, args.threads)
        verify_torch_dist(args.source, partial, args.resolved.config.model.architecture, args.threads)
        return files

    sources = [path for path in args.adopted.rglob("*") if path.is_file()]
    make_folder(args, Receipt(STEP, (), source_of(args, "hf_patched"), {}), adopt, sources)


if __name__ == "__main__":
    run(main)
