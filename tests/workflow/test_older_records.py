"""What Snakemake has written down about a store of version 0.1 plans nothing of it anew.

The fixture was made at commit 8f13c6a by `snakemake --touch --forceall` of the targets and settings below, over
receipts that are there: Snakemake's records of the jobs, and for the receipts, which a dry run does not read, `{}`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from tests.support.workflow_runs import run_snakemake

pytestmark = pytest.mark.slow

RECORDS = Path(__file__).parents[1] / "fixtures" / "quantized_0_1.tar.xz"
TARGETS = ("finalize_rollout_fp8", "finalize_serving", "finalize_bf16")
# What was made before weights for serving were calibrated is what is made now where that is left out.
SOURCE = (
    f"serving.uncalibrated=true model.source.kind=hub model.source.repo_id=owner/name model.source.revision={'a' * 40}"
)


def test_what_three_pairs_of_rules_made_is_not_made_by_the_one_that_replaced_them(tmp_path: Path) -> None:
    with tarfile.open(RECORDS) as archive:
        archive.extractall(tmp_path, filter="data")
    assert "Nothing to be done" in run_snakemake(tmp_path, "-n", *TARGETS, "--config", f"set={SOURCE}").stdout
    for name in ("bf16-????????.parts/1.receipt.json", "bf16-????????.receipt.json"):
        (gone,) = tmp_path.glob(f"resources/tiny/*/{name}")
        gone.unlink()
    planned = run_snakemake(tmp_path, "-n", *TARGETS, "--config", f"set={SOURCE}").stdout
    assert "quantise part 1 of 2 to BF16" in planned
    assert "quantise part 0 of 2" not in planned
