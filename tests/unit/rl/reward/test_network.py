"""Grading over a network: real servers on loopback that are slow, refuse, break off and talk nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.support.canaries import CANARIES, command_lines, found_in
from tests.support.rejections import rejected
from tests.support.reward_server import Fault, RewardServer, backwards, cut, nonsense, says, slow, status, trickle

from posttrain.config.services import Service
from posttrain.plan.resolve import resolve
from posttrain.rl.reward import network
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer, check_failures
from posttrain.rl.reward.service import ServiceGrader

ROOT = Path(__file__).parents[4]
VARIABLE = "HF_TOKEN"
QUESTION = ({"role": "user", "content": "?"},)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "FIRST_WAIT_SECONDS", 0.02)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited; nobody waits."""
    seconds, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda wait: seconds.append(wait) or sleep(0))
    return seconds


def ask(server: RewardServer | str, *texts: str, **settings: object) -> list[Grade | Failure]:
    url = server if isinstance(server, str) else server.url
    grader = ServiceGrader("reward.services.far", Service(**{"url": url, "deadline_seconds": 20.0, **settings}))
    return asyncio.run(grader.grade_all([Answer(text, "b", QUESTION) for text in texts]))


def scores(outcomes: list[Grade | Failure]) -> list[float | str | None]:
    return [outcome.kind if isinstance(outcome, Failure) else outcome.score for outcome in outcomes]


def test_the_order_is_kept_whatever_comes_back_first() -> None:
    texts = ["x" * length for length in range(10)]
    with RewardServer(backwards(4)) as server:
        assert scores(ask(server, *texts, batch_size=3, max_requests=4)) == [float(length) for length in range(10)]
    assert sorted(len(body["answers"]) for body in server.asked) == [1, 3, 3, 3]
    assert server.most_at_once == 4


def test_what_is_sent() -> None:
    row = Answer("y", {"x": [1]}, QUESTION, "gsm8k", {"level": 2}, num_tokens=5, is_truncated=True)
    with RewardServer() as server:
        grader = ServiceGrader("s", Service(url=server.url, batch_size=2))
        asyncio.run(grader.grade_all([row, row, Answer("y")]))
        asyncio.run(grader.grade_all([row, row]))
    one, other = server.asked[0]["answers"]
    assert (
        one
        == other
        == {
            "id": one["id"],
            "prompt": list(QUESTION),
            "response": "y",
            "label": {"x": [1]},
            "source": "gsm8k",
            "columns": {"level": 2},
            "num_tokens": 5,
            "is_truncated": True,
        }
    )
    (third,) = server.asked[1]["answers"]
    assert (third["label"], third["id"] != one["id"]) == (None, True)
    keys = [headers["Idempotency-Key"] for headers in server.headers]
    assert keys[0] == keys[2] != keys[1], "the same content has the same key"
    assert "Authorization" not in server.headers[0]


def test_no_more_requests_are_under_way_than_allowed_whoever_asks() -> None:
    with RewardServer(always=slow(0.05)) as server:
        grader = ServiceGrader("s", Service(url=server.url, batch_size=1, max_requests=3))

        async def story() -> None:
            await asyncio.gather(*(grader.grade_all([Answer(str(n))] * 4) for n in range(3)))

        asyncio.run(story())
        asyncio.run(story())
    assert (len(server.asked), server.most_at_once) == (24, 3)


@pytest.mark.parametrize(
    "faults",
    [[cut], [status(503)], [status(429, Retry_After="0")], [status(500), cut, status(529)], [nonsense]],
    ids=["cut", "busy", "too-many", "three", "nonsense"],
)
def test_what_may_work_next_time_is_asked_again(faults: list, caplog: pytest.LogCaptureFixture) -> None:
    with RewardServer(faults) as server:
        assert scores(ask(server, "four")) == [4.0]
    assert len(server.asked) == len(faults) + 1
    assert len({headers["Idempotency-Key"] for headers in server.headers}) == 1
    assert [record.name for record in caplog.records].count("posttrain.checkpoint.hub.retries") == len(faults)
    assert f"reward.services.far: {'HTTP' if faults[0] not in (cut, nonsense) else 'Remote'}" in caplog.text


def test_the_server_says_when(waits: list[float]) -> None:
    with RewardServer([status(429, Retry_After="3")]) as server:
        assert scores(ask(server, "four")) == [4.0]
    assert [seconds for seconds in waits if seconds] == [3.0]


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 408, 422])
def test_what_will_not_work_next_time_either_is_not_asked_again(code: int) -> None:
    with RewardServer([status(code, Location="/score")]) as server:
        (outcome,) = ask(server, "four")
    redirect = "redirects to '/score', which is not followed: name the address itself"
    assert outcome == Failure("error", f"HTTP {code}: {redirect if code == 301 else 'you are None'}")
    assert len(server.asked) == 1


def test_it_is_asked_again_so_often_and_no_more() -> None:
    with RewardServer(always=status(503)) as server:
        outcomes = ask(server, "four", "five", num_retries=2)
        assert outcomes == [Failure("connection", "HTTP 503: you are None; 3 attempts")] * 2
        assert len(server.asked) == 3
        ask(server, "four", num_retries=0)
    assert len(server.asked) == 4


def test_nobody_there_is_a_failure() -> None:
    with RewardServer() as server:
        gone = server.url
    (outcome,) = ask(gone, "four", num_retries=1)
    assert outcome.kind == "connection"
    assert "ConnectError" in outcome.reason


@pytest.mark.parametrize(
    ("fault", "seconds", "why"),
    [(slow(60), 0.1, ""), (trickle, 0.3, ""), (status(503), 1.0, "; HTTP 503: you are None")],
    ids=["slow", "trickle", "busy"],
)
def test_the_deadline_holds(fault: Fault, seconds: float, why: str) -> None:
    """Without one the first would be graded, and the others never end."""
    with RewardServer(always=fault) as server:
        (outcome,) = ask(server, "four", deadline_seconds=seconds, num_retries=1000)
    assert outcome == Failure("deadline", f"no answer within {seconds:g} s{why}")


def test_a_server_that_asks_for_more_patience_than_there_is_is_not_waited_for(waits: list[float]) -> None:
    with RewardServer(always=status(429, Retry_After="30")) as server:
        assert scores(ask(server, "four", deadline_seconds=10.0)) == ["deadline"]
    assert not any(waits)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[NaN]", "expected a finite number"),
        ("[1e999]", "expected a finite number"),
        (f"[1{'0' * 400}]", "expected a finite number"),
        ("[1e39]", "a score of 1e+39 for the response 'four'; expected None or a number between"),
        ("[true]", "expected a finite number"),
        ('["1"]', "expected a finite number"),
        ('[{"length": 1}]', "with a score"),
        ('[{"score": 1, "why": "good"}]', "expected a finite number"),
        ('[{"score": 1, "length": NaN}]', "expected a finite number"),
        ("[]", "expected a list of 1, one for each answer, came a list of 0"),
        ("[1, 2]", "came a list of 2"),
        ('{"scores": [1]}', "came {'scores': [1]}"),
        ("1", "expected a list of 1"),
        ("", "no JSON"),
        ("<html>", "no JSON"),
        ("[" * 200_000, "nested too deep"),
        ("[" + "1," * (9 << 20), "an answer of more than 16777216 bytes"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_grade_is_a_failure_and_no_score(text: str, reason: str) -> None:
    with RewardServer([says(text)]) as server:
        (outcome,) = ask(server, "four")
    assert isinstance(outcome, Failure)
    assert outcome.kind == "error"
    assert reason in outcome.reason
    assert len(outcome.reason) < 500


def test_what_an_address_says_is_told_up_to_300_characters() -> None:
    with RewardServer([says(f'"{"x" * length}"') for length in (300, 301)]) as server:
        whole, cut_off = (ask(server, "four")[0] for _ in range(2))
    assert whole.reason.endswith(f"came {'x' * 300}")
    assert cut_off.reason.endswith(f"came {'x' * 300}...")


def test_a_wrong_grade_costs_its_own_answer_only() -> None:
    with RewardServer([says('[1, null, NaN, {"score": 0.5, "length": 3}, {"score": null, "length": 4}]')]) as server:
        one, two, three, four, five = ask(server, *"abcde")
    assert (one, two, three.kind) == (Grade(1.0), Grade(None), "error")
    assert (four, five) == (Grade(0.5, {"length": 3.0}), Grade(None, {"length": 4.0}))


def test_an_address_that_does_not_prove_who_it_is_is_told_nothing(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-keyout", key, "-out"]
    subprocess.run(["openssl", *words, certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (outcome,) = ask(f"https://127.0.0.1:{server.server_port}/score", "four", num_retries=0)
        server.shutdown()
        thread.join()
    assert isinstance(outcome, Failure)
    assert "CERTIFICATE_VERIFY_FAILED" in outcome.reason
    assert asked == []


# A process of its own, because logging is configured once in it: at DEBUG, as somebody does who looks for a fault.
ASKING = """
import asyncio, sys
from posttrain.config.services import Service
from posttrain.report.logging import configure_logging
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.service import ServiceGrader
configure_logging()
grader = ServiceGrader("far", Service(url=sys.argv[1], token_variable="HF_TOKEN", batch_size=1, num_retries=1))
for _ in range(4):
    print(asyncio.run(grader.grade_all([Answer("four")])))
"""


def test_the_token_is_shown_to_the_address_and_to_nobody_else(tmp_path: Path) -> None:
    token, log = CANARIES[VARIABLE], tmp_path / "log"
    said = [says(f'["{token}"]'), status(401), *[status(503)] * 2, *[nonsense] * 2]
    more = {VARIABLE: f" {token}\n", "POSTTRAIN_LOG_LEVEL": "DEBUG", "POSTTRAIN_LOG": str(log)}
    with RewardServer(said) as server, command_lines() as seen:
        command = [sys.executable, "-c", ASKING, server.url]
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, check=False)
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {token}"] * 6
    assert (ended.stdout.count("Failure"), ended.stdout.count("***")) == (4, 4)
    assert "retry 1 of 1" in log.read_text()
    assert any("asyncio.run" in line for line in seen)
    for text in (ended.stdout, ended.stderr, log.read_text(), *seen):
        assert found_in(text) == []


@pytest.mark.parametrize("value", ["", "two words", f"{CANARIES[VARIABLE]}\nX-Other: 1"])
def test_a_token_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with rejected("secret-not-set", "HF_TOKEN") as refused:
        ask("http://127.0.0.1:9", "four", token_variable=VARIABLE)
    assert not found_in(str(refused.value))
    assert "two words" not in str(refused.value)


def score(config: str, *groups: list[Answer]) -> list[list[Scored]]:
    resolved = resolve({"model": "tiny", "site": "local", "set": config}, ROOT / "config").config
    with GraderPool(num_workers=1) as pool:
        return asyncio.run(Scorer(resolved, pool).score(groups))


def test_a_service_is_a_term_of_the_reward_like_any_other() -> None:
    groups = [Answer("b", "b", QUESTION), Answer("ccc", "b", QUESTION)], [Answer("dd", "b", QUESTION)]
    with RewardServer() as server, RewardServer([says('[null, {"score": 2, "depth": 7}, NaN]')]) as other:
        words = (
            "data.reward=exact_match+0.5*far+-1*other "
            f"reward.services.far.url={server.url} reward.services.other.url={other.url}"
        )
        (one, two), (three,) = score(words, *groups)
    assert (one.reward, one.scores) == (1.5, {"exact_match": 1.0, "far": 1.0, "other": None})
    assert (two.reward, two.parts) == (-0.5, {"other/depth": 7.0})
    assert (three.reward, three.scores) == (None, {"exact_match": 0.0, "far": 2.0, "other": None})
    assert three.failure.startswith("other: error: expected a finite number")
    assert (len(server.asked), len(other.asked)) == (1, 1)


def test_a_server_that_is_killed_in_the_middle_costs_counted_failures() -> None:
    command = [sys.executable, "-m", "tests.support.reward_server", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        url = json.loads(process.stdout.readline())
        words = f"data.reward=far reward.services.far.url={url} "
        more = "reward.services.far.batch_size=1 reward.services.far.max_requests=2 reward.services.far.num_retries=1"
        found = [one for (one,) in score(words + more, *([Answer("four")] for _ in range(20)))]
    assert process.returncode == 1
    graded = [one for one in found if one.reward is not None]
    assert [one.reward for one in graded] == [4.0] * len(graded)
    assert 2 <= len(graded) <= 3, "of two under way the one that dies may take the other along"
    assert {one.failure.partition(": ")[2][:10] for one in found if one not in graded} == {"connection"}
    with pytest.raises(RuntimeError, match=r"graders failed for 1[78] of 20 responses"):
        check_failures([one.failure for one in found], 0.05)
