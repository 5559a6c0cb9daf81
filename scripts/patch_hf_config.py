"""Check a checkpoint against the configured architecture, and make the copy that all later steps read.

The copy's weights are links, except shards in a format other than published. `config.json` and the tokenizer change if
the configuration or the checkpoint requires it. Tensors that repeat others are compared with them.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.formats.config_sections import CONFIG
from posttrain.checkpoint.formats.hf_config import check_config
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.patched_copy import patch_folder
from posttrain.checkpoint.formats.resaved_weights import published_specs
from posttrain.checkpoint.formats.tied_copies import DROP, check_copies, differing_copies, read_as
from posttrain.checkpoint.parts.steps import FOLDER, SOURCE, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.model_files import model_digests
from posttrain.errors import CheckpointError, raise_if_any
from posttrain.plan.preflight.image_processor import check_image_processor
from posttrain.rl.data.tokenizer_check import check_tokenizer
from posttrain.store import FileRecord, Receipt, require_files


def main() -> None:
    """Compare, patch, and write the receipt."""
    args = command_line(__doc__, **SOURCE, **FOLDER, resolved=RESOLVED)
    wanted = args.resolved.config
    model = wanted.model
    source = require_files(args.source, args.source_receipt)
    reader, config = check_layout(args.source), read_object(args.source / CONFIG)
    differing = differing_copies(config, model.architecture, reader)
    read = read_as(config, differing, model.patch.copies)
    problems = check_config(read, model.architecture, published_specs(reader.infos, model.architecture))
    problems += check_copies(config, model.architecture, reader, differing, model.patch.copies)
    # Here, before weights are converted and a GPU is asked for.
    raise_if_any([*problems, *check_image_processor(wanted, args.source)])
    dropped = sorted(differing) if model.patch.copies == DROP else []
    digests, missing = model_digests(model)
    raise_if_any(missing)
    if digests != model.own_digests:
        raise CheckpointError(
            "named-files-changed",
            "the files that model.tokenizer and model.chat_template name have changed; plan again",
        )

    def patch(partial: Path) -> tuple[FileRecord, ...]:
        files = patch_folder(args.source, partial, model, source, dropped, unties=read != config)
        check_layout(partial)
        raise_if_any(check_tokenizer(partial, model.architecture.vocab_size))
        return files

    kept = {"dropped": dropped, "own_digests": digests}
    settings = {"target": model.patch.target, **{key: value for key, value in kept.items() if value}}
    make_folder(args, Receipt("patch_hf_config", (), {"hf": source.digest}, settings), patch)


if __name__ == "__main__":
    run(main)
