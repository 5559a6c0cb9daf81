"""Writes one part of a Megatron distributed checkpoint from a checkpoint in Hub layout."""

from __future__ import annotations

from posttrain.checkpoint.formats.torch_dist import STEP, Conversion
from posttrain.checkpoint.parts.steps import PART, SOURCE, make_part, source_of
from posttrain.cli import RESOLVED, command_line, run


def main() -> None:
    """Check the source, copy this part's tensors, and write the part's receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **PART,
        resolved=RESOLVED,
    )
    architecture = args.resolved.config.model.architecture
    inputs = source_of(args, "hf_patched")
    make_part(STEP, args, inputs, lambda: Conversion(args.source, inputs["hf_patched"], architecture))


if __name__ == "__main__":
    run(main)
