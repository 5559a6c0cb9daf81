"""Check a checkpoint against the configured architecture and make the copy that everything later reads.

The copy's weights are links; `config.json` and `tokenizer_config.json` change where the target asks for it.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts import FileRecord, Receipt, require_files
from posttrain.checkpoint.formats.hf_config import CONFIG, check_config, patch_folder
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
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
    tensors = check_layout(args.source).infos
    raise_if_any(check_config(read_object(args.source / CONFIG), architecture, tensors, args.trust_remote_code))

    def patch(partial: Path) -> tuple[FileRecord, ...]:
        files = patch_folder(args.source, partial, args.target, source)
        check_layout(partial)
        return files

    make_folder(args, Receipt("patch_hf_config", (), {"hf": source.digest}, {"target": args.target}), patch)


if __name__ == "__main__":
    run(main)
