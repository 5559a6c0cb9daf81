from __future__ import annotations

import json
from pathlib import Path

from tests.support.megatron_single import run_gangs
from tests.support.nan_ranks import NAME


def test_a_nan_of_any_rank_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    """gloo's maximum keeps a NaN of rank 0 and loses that of any other."""
    run_gangs("nan_ranks", {"folder": str(tmp_path)})
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["None"] == ["", ""]
    assert told["largest None"] == [["1.0", "2.0", "-inf"]] * 2
    for having in ("0", "1"):
        assert all(words.startswith(f"{NAME}: holds NaN or infinity") for words in told[having])
        assert all("fork=RUN@STEP" in words for words in told[having])
        assert told[f"largest {having}"] == [["1.0", "nan", "-inf"]] * 2, "not that of rank 0 alone"
