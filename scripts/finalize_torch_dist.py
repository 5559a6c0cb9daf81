"""Joins the parts of a Megatron distributed checkpoint, and renames its folder."""

from __future__ import annotations

from posttrain.checkpoint.formats.torch_dist import FINALIZE_STEP, STEP, Conversion
from posttrain.checkpoint.parts.steps import JOIN, SOURCE, join_parts, source_of
from posttrain.cli import RESOLVED, command_line, run


def main() -> None:
    """Check the parts, write the metadata, compare everything with the source on request, write the receipt."""
    args = command_line(
        __doc__,
        **SOURCE,
        **JOIN,
        resolved=RESOLVED,
        verify={"action": "store_true", "help": "read everything again and compare it bit by bit"},
        threads={"type": int, "default": 1, "help": "tensors compared at a time"},
    )
    architecture = args.resolved.config.model.architecture
    inputs, threads_to_verify = source_of(args, "hf_patched"), args.threads if args.verify else 0
    making = Conversion(args.source, inputs["hf_patched"], architecture, threads_to_verify=threads_to_verify)
    join_parts(FINALIZE_STEP, STEP, args, inputs, making)


if __name__ == "__main__":
    run(main)
