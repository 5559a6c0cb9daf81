"""Load the export with transformers, and compare its log-probabilities with those that the trainer recorded."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.cli import RESOLVED, command_line, run
from posttrain.rl.evaluation.export_check import STEP, check_export, in_words
from posttrain.store import Receipt, receipt_of, record_files, require_files, write_json, write_receipt


def main() -> None:
    """Check the export, write the result and its receipt; a disabled check is recorded, too."""
    started = time.time()
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        export=(Path, "the exported checkpoint"),
        export_receipt=(Path, "its receipt"),
        check={"required": True, "choices": ("whole", "layers", "off"), "help": "how it is loaded; off: not at all"},
        output=(Path, "what was found, as JSON; its receipt is written last"),
    )
    exported = require_files(args.export, args.export_receipt)
    receipt_of(args.output).unlink(missing_ok=True)  # of the result that this one replaces
    model = args.resolved.config.model
    found = {"check": "off"} if args.check == "off" else check_export(args.export, model, args.check)
    write_json(args.output, found | {"said": in_words(found)})
    files = record_files(args.output.parent, [args.output.name])
    receipt = Receipt(STEP, files, {"export": exported.digest}, {"check": args.check})
    write_receipt(receipt_of(args.output), receipt, started)
    print(f"{args.export}: {in_words(found)}")


if __name__ == "__main__":
    run(main)
