import json
import subprocess
import sys

from tests.support.evaluation_inputs import ROOT, make_inputs


def test_the_table_has_a_row_per_concurrency(tmp_path):
    output = tmp_path / "serving.json"
    arguments = [*make_inputs(tmp_path, "engine.num_threads=1"), "--output", output, "--requests", 8]
    arguments += ["--concurrency", 1, 4, "--output-tokens", 5]
    script = ROOT / "scripts" / "benchmark_serving.py"
    ended = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    levels = json.loads(output.read_text())["levels"]
    assert [(level["concurrency"], level["num_requests"]) for level in levels] == [(1, 8), (4, 8)]
    for level in levels:
        assert 0 < level["ttft_ms_median"] < level["latency_ms_median"]
        assert level["tpot_ms_median"] > 0
        assert level["output_tokens_per_second"] > 0
    header, *rows = ended.stdout.splitlines()
    assert "TTFT ms" in header
    assert [row.split()[0] for row in rows] == ["1", "4"]
