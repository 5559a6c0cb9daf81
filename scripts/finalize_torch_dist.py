"""Makes the parts of Megatron's distributed checkpoint one checkpoint, and gives the folder its name."""

from __future__ import annotations

from posttrain.checkpoint.formats.torch_dist import FINALIZE_STEP, STEP, Conversion
from posttrain.checkpoint.parts.steps import join_parser, join_parts, read_architecture, source_of
from posttrain.cli import run


def main() -> None:
    """Check the parts, write the metadata, compare everything with the source if asked, write the receipt."""
    parser = join_parser(__doc__)
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--verify", action="store_true", help="read everything again and compare it bit by bit")
    parser.add_argument("--threads", type=int, default=1, help="tensors compared at a time")
    args = parser.parse_args()
    inputs, threads_to_verify = source_of(args, "hf_patched"), args.threads if args.verify else 0
    making = Conversion(args.source, inputs["hf_patched"], args.architecture, threads_to_verify=threads_to_verify)
    join_parts(FINALIZE_STEP, STEP, args, inputs, making)


if __name__ == "__main__":
    run(main)
