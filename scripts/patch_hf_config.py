"""Check a checkpoint against the configured architecture and make the copy that everything later reads.

The copy's weights are links; `config.json` and `tokenizer_config.json` change where the target asks for it. Tensors
that repeat others are compared with those.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts import FileRecord, Receipt, require_files
from posttrain.checkpoint.formats.hf_config import CONFIG, check_config, patch_folder
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.tied_copies import DROP, check_copies, differing_copies, read_as
from posttrain.checkpoint.parts.steps import FOLDER, SOURCE, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.errors import raise_if_any


def main() -> None:
    """Compare, patch, write the receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **FOLDER,
        resolved=RESOLVED,
        target={"required": True, "choices": ("native", "deepseek_v32")},
        trust_remote_code={"action": "store_true", "help": "accept a checkpoint with `auto_map`"},
    )
    architecture = args.resolved.config.model.architecture
    source = require_files(args.source, args.source_receipt)
    reader, config = check_layout(args.source), read_object(args.source / CONFIG)
    choice = args.resolved.config.model.patch.copies
    differing = differing_copies(config, architecture, reader)
    read = read_as(config, differing, choice)
    problems = check_config(read, architecture, reader.infos, args.trust_remote_code)
    raise_if_any([*problems, *check_copies(config, architecture, reader, differing, choice)])
    dropped = sorted(differing) if choice == DROP else []

    def patch(partial: Path) -> tuple[FileRecord, ...]:
        files = patch_folder(args.source, partial, args.target, source, dropped, unties=read != config)
        check_layout(partial)
        return files

    settings = {"target": args.target, **({"dropped": dropped} if dropped else {})}
    make_folder(args, Receipt("patch_hf_config", (), {"hf": source.digest}, settings), patch)


if __name__ == "__main__":
    run(main)
