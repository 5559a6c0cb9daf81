"""Our table beside SGLang's own tool, of a real SGLang. It takes minutes, and a machine that does nothing else."""

import pytest
from benchmarks.serving import CONCURRENCIES, HIGHEST, LOWEST, PAIRS, ratios, served
from tests.support.sglang_environment import require_sglang


@pytest.mark.sglang
@pytest.mark.faults("slow")
@pytest.mark.timeout(1800)
def test_engines_are_as_fast_as_their_own_tool_says(tmp_path):
    require_sglang()
    with served(tmp_path) as endpoint:
        found = {concurrency: ratios(endpoint, concurrency, PAIRS) for concurrency in CONCURRENCIES}
    outside = {
        (concurrency, name): ratio
        for concurrency, told in found.items()
        for name, ratio in told.items()
        if not LOWEST <= ratio <= HIGHEST
    }
    assert not outside
