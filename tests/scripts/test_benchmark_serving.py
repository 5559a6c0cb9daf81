import json

from tests.support.evaluation_inputs import make_inputs
from tests.support.forked_programs import run_step

ASKED = (
    "evaluation.serving.concurrency=[1,4] evaluation.serving.output_tokens=5 evaluation.serving.requests_per_client=2"
)


def test_the_table_has_a_row_per_concurrency(tmp_path):
    output = tmp_path / "serving.json"
    asked = f"engine.num_threads=1 evaluation.serving.prompts=heldout evaluation.serving.beside=[published] {ASKED}"
    arguments = [*make_inputs(tmp_path, asked), "--output", output]
    ended = run_step("benchmark_serving", arguments)
    assert ended.returncode == 0, ended.stderr
    levels = json.loads(output.read_text())["rows"]
    assert [(level["concurrency"], level["num_requests"]) for level in levels] == [(1, 8), (4, 8)]
    for level in levels:
        assert 0 < level["ttft_ms"] < level["latency_ms"]
        assert level["tpot_ms"] > 0
        assert level["output_tokens_per_second"] > 0
        assert level["tokens_per_chunk"] == 1
    assert "TTFT ms" in ended.stdout
    assert "embedded: peak" in ended.stdout
    assert "HGX B200" in output.with_suffix(".html").read_text()
    assert output.with_suffix(".csv").exists()
