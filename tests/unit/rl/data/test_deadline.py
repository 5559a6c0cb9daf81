from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.data import chat
from posttrain.rl.data.deadline import deadline

# Minutes.
LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(256)
    tokenizer.chat_template = LOOPS
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    with rejected("template-does-not-end", "0.2 s"):
        chat.ChatTokenizer(tmp_path).render([{"role": "user", "content": "a"}])


def test_the_timer_that_ran_before_runs_on() -> None:
    before = signal.getsignal(signal.SIGALRM)
    outer = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with deadline(5):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 5
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_another_thread_is_left_alone() -> None:
    done = []

    def work() -> None:
        with deadline(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
