"""The command against an endpoint of a script: its files, and what it refuses."""

import json
import shutil

import pytest
from tests.support.forked_programs import run_posttrain
from tests.support.scripted_endpoint import scripted_endpoint
from tests.support.served_in_foreground import SECRET, serving
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt, write_reference_logprobs
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain_serving.benchmark.serving_results import read_table

SHORT = ("--input-tokens", "8", "--output-tokens", "16", "--concurrency", "1", "4", "--requests-per-client", "2")


@pytest.fixture(scope="module")
def address():
    with scripted_endpoint() as url:
        yield url


def ask(folder, url, *options, model="single"):
    return run_posttrain("benchmark", url, "--model", model, *SHORT, *options, folder=folder)


def test_a_table_a_page_and_files(address, tmp_path):
    ended = ask(tmp_path, address, "--name", "mine", "--beside", "published", "--output", "out/a.json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "out" / "a.json").read_text())
    assert [row["concurrency"] for row in told["rows"]] == [1, 4]
    assert told["is_complete"]
    assert told["failed"] is None
    table = read_table(tmp_path / "out" / "a.csv")
    assert (table.name, len(table.rows)) == ("mine", 2)
    assert "HGX B200" in (tmp_path / "out" / "a.html").read_text()
    assert "mine: peak" in ended.stdout
    assert ended.stderr.count("is not compared with what was trained") == 1
    assert "at 128; saturated from 128" in ended.stdout
    assert "4 in flight: 8 of 8 requests (100 %)" in ended.stderr
    # Its own table beside another one's.
    ended = ask(tmp_path, address, "--name", "other", "--beside", "out/a.csv", "--concurrency", "2")
    names = [line.removesuffix(" *").split()[-1] for line in ended.stdout.splitlines()[1:4]]
    assert names == ["mine", "other", "mine"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "nobody"), "--model = nobody"),
        (("--input-tokens", "4000", "--output-tokens", "97"), "4,097"),
        (("--concurrency", "0"), "a length or a count = 0"),
        (("--chat",), "--dataset = not given, with --chat"),
        (("--dataset", "none.jsonl"), "none.jsonl"),
        (("--beside", "none.csv"), "beside = none.csv"),
        (("--checkpoint", "none"), "checkpoint = 'none'"),
        (("--checkpoint", "zai-org/GLM-5"), "--checkpoint = zai-org/GLM-5"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_sent(address, tmp_path, options, told):
    ended = ask(tmp_path, address, *options)
    assert ended.returncode == 1
    assert told in ended.stderr
    assert not (tmp_path / "serving.json").exists()


def test_who_serves_something_else_is_refused_before_anything_counts(tmp_path, monkeypatch):
    """A real engine, and a checkpoint whose canary is nobody's."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    served, (port,) = tmp_path / "served", choose_free_ports(1)
    make_random_checkpoint(served, TINY_QWEN3)
    make_tokenizer(TINY_QWEN3.max_position_embeddings).save_pretrained(served)
    exported = tmp_path / "exported"
    shutil.copytree(served, exported)
    nobodys = ReferencePrompt([{"role": "user", "content": "1"}], None, [5, 6, 7], [8, 9], [-0.01, -0.01])
    write_reference_logprobs(exported, ReferenceLogprobs("fp32", {}, [nobodys]))
    words = (served, "--engine", "embedded", "--hardware", "cpu", "--port", port)
    with serving(tmp_path, *words, until="healthy at"):
        ended = ask(tmp_path, f"http://127.0.0.1:{port}", "--checkpoint", str(exported), model=str(served))
    assert ended.returncode == 1
    assert f"http://127.0.0.1:{port} = its log-probabilities are" in ended.stderr
    assert "chat" not in ended.stderr, "no conversation is sent"
    assert not (tmp_path / "serving.json").exists()


def test_nothing_at_the_address(tmp_path):
    ended = ask(tmp_path, "http://127.0.0.1:1")
    assert ended.returncode == 1
    assert "http://127.0.0.1:1/v1/models does not list models" in ended.stderr


def test_who_dies_in_the_middle_leaves_the_rows_before_and_a_rerun_goes_on(tmp_path):
    """The endpoint dies with its 20th request: 9 for the first row, 4 to warm up the second, which has 8."""
    output = tmp_path / "serving.json"
    with scripted_endpoint() as url:
        ended = ask(tmp_path, url, model="dies")
    assert ended.returncode == 1
    assert "4 in flight: " in ended.stderr
    assert "1 row before it is kept; the same command goes on here" in ended.stderr
    told = json.loads(output.read_text())
    assert [row["concurrency"] for row in told["rows"]] == [1]
    assert told["failed"]["concurrency"] == 4
    assert "broke off" in told["failed"]["why"]
    assert len(read_table(output.with_suffix(".csv")).rows) == 1
    port = url.rpartition(":")[2]
    with scripted_endpoint(int(port)) as again:
        assert again == url
        ended = ask(tmp_path, url, model="dies")
    assert ended.returncode == 0, ended.stderr
    finished = json.loads(output.read_text())
    assert finished["rows"][0] == told["rows"][0], "measured before, and kept"
    assert [row["concurrency"] for row in finished["rows"]] == [1, 4]
