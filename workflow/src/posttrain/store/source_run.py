"""The export of another run as the source of this one: found by the run's name, pinned by its digest.

The digest of the export's receipt becomes `model.source.revision`, like a commit of the Hub. It is part of the
experiment and of the store's folder, so another training under the same name is another source.
"""

from __future__ import annotations

import dataclasses

from posttrain.config.fields import did_you_mean
from posttrain.config.load import Resolved, run_name
from posttrain.errors import ConfigError, Problem
from posttrain.store.paths import Paths, receipt_of
from posttrain.store.receipts import read_receipt

KEY, REVISION = "model.source.run", "model.source.revision"


def with_pinned_source(resolved: Resolved) -> Resolved:
    """Return the configuration with the digest of its source export, if its source is a run.

    If the run is gone, a digest that the user gave is kept, because the store may still contain the export.

    Raises:
        ConfigError: The run has no export, or one with another digest.
        CheckpointError: The export's receipt cannot be read.
    """
    source = resolved.config.model.source
    if source.kind != "run":
        return resolved
    receipt = receipt_of(Paths(resolved).source_export)
    if source.run == resolved.run:
        raise ConfigError(
            [
                Problem(
                    "source-is-itself", KEY, source.run, "another run than this one", "give this one a name with run="
                )
            ]
        )
    if not receipt.exists():
        if source.revision:
            return resolved
        raise ConfigError([_no_export(resolved)])
    digest = read_receipt(receipt).digest
    if source.revision not in ("", digest):
        remedy = "leave it out to take the export that is there, or restore the other one"
        raise ConfigError(
            [Problem("export-changed", REVISION, source.revision, f"{digest}, which {receipt} has", remedy)]
        )
    model = dataclasses.replace(resolved.config.model, source=dataclasses.replace(source, revision=digest))
    config = dataclasses.replace(resolved.config, model=model)
    is_named = resolved.run != run_name(resolved.config, resolved.fork)
    run = resolved.run if is_named else run_name(config, resolved.fork)
    return dataclasses.replace(resolved, config=config, run=run, origins={**resolved.origins, REVISION: str(receipt)})


def _no_export(resolved: Resolved) -> Problem:
    export = Paths(resolved).source_export
    found = sorted(path.parent.name for path in export.parents[1].glob(f"*/{receipt_of(export).name}"))
    name = resolved.config.model.source.run
    remedy = did_you_mean(name, found) or f"train and export it first: snakemake finalize_export_hf --config run={name}"
    allowed = ", ".join(found) or f"a run in {export.parents[1]} whose model is exported; there is none"
    return Problem("no-such-run", KEY, name, allowed, remedy)
