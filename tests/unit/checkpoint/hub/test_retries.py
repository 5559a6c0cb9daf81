import email.utils
import time

import pytest
from httpx2 import ReadError, UnsupportedProtocol

from posttrain.checkpoint.hub.retries import BadStatus, GaveUp, Retries, RetryRule

RULE = RetryRule(num_retries=5, first_wait_seconds=1, longest_wait_seconds=6)


@pytest.fixture
def waits():
    return []


@pytest.fixture
def retries(waits):
    return Retries(RULE, "a file", waits.append)


def test_waits_double_up_to_a_limit_and_end(retries, waits, caplog):
    for _ in range(5):
        retries.wait_after(BadStatus(503))
    assert waits == [1, 2, 4, 6, 6]
    assert "a file: HTTP 503; retry 3 of 5 in 4.0 s" in caplog.text
    with pytest.raises(GaveUp, match="6 attempts") as raised:
        retries.wait_after(ReadError("cut"))
    assert isinstance(raised.value.__cause__, ReadError)


def test_bytes_in_between_begin_the_count_anew(retries, waits):
    for _ in range(20):
        retries.wait_after(ReadError("cut"), made_progress=True)
    assert waits == [1] * 20


def test_the_server_says_when(retries, waits):
    retries.wait_after(BadStatus(429, "30"))
    retries.wait_after(BadStatus(503, email.utils.formatdate(time.time() + 20)))
    retries.wait_after(BadStatus(503, "soon"))
    assert waits[0] == 30
    assert 18 <= waits[1] <= 20
    assert waits[2] == 4
    with pytest.raises(GaveUp, match="it asks to wait for 901 s"):
        retries.wait_after(BadStatus(429, "901"))


@pytest.mark.parametrize("error", [BadStatus(404), BadStatus(403), UnsupportedProtocol("ftp")])
def test_what_will_not_work_next_time_either_is_not_tried_again(retries, waits, error):
    with pytest.raises(type(error)) as raised:
        retries.wait_after(error)
    assert raised.value is error
    assert waits == []
