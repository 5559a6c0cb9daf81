"""Our table beside each engine's own tool. It takes minutes, and a machine that does nothing else."""

import pytest
from benchmarks.serving import CONCURRENCIES, HIGHEST, LOWEST, PAIRS, REQUIRED, ratios, served


@pytest.mark.faults("slow")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "engine", [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
)
def test_engines_are_as_fast_as_their_own_tool_says(engine, tmp_path):
    REQUIRED[engine]()
    with served(engine, tmp_path) as by:
        found = {concurrency: ratios(by, concurrency, PAIRS) for concurrency in CONCURRENCIES}
    outside = {
        (concurrency, name): ratio
        for concurrency, told in found.items()
        for name, ratio in told.items()
        if not LOWEST <= ratio <= HIGHEST
    }
    print(found)
    assert not outside
