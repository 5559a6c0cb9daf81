"""Runs a function in a child process with limited time and memory, for untrusted tokenizers and chat templates."""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Limit on an answer, which is a few lines of text.
MAX_ANSWER_BYTES = 1 << 24


def confined(work: Callable[[], Any], seconds: float, num_bytes: int) -> Any:
    """Run a function in a forked child and return its result.

    Args:
        work: Returns plain JSON types, so that nothing from the child is unpickled here.
        seconds: Time limit, after which it is killed.
        num_bytes: Memory limit on top of this process's memory.

    Raises:
        TimeoutError: The time limit has passed.
        MemoryError: The memory limit was exceeded.
        ChildProcessError: The child died, or its answer is too long.
    """
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, answer, num_bytes), daemon=True)
    process.start()
    answer.close()
    try:
        if not answers.poll(seconds):
            raise TimeoutError(f"not done after {seconds:g} s")
        done, result = json.loads(answers.recv_bytes(MAX_ANSWER_BYTES))
    except EOFError:
        process.join()
        raise ChildProcessError(f"the process that read it ended with {process.exitcode}") from None
    except TimeoutError:
        raise
    except OSError as error:
        raise ChildProcessError(f"its answer is cut or over {MAX_ANSWER_BYTES / 2**20:g} MiB") from error
    finally:
        process.kill()
        process.join()
        answers.close()
    if not done:
        raise MemoryError(f"it takes more than {num_bytes / 2**30:.2g} GiB")
    return result


def _work(work: Callable[[], object], answer: Connection, num_bytes: int) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = json.dumps([True, work()]).encode()
    except MemoryError:
        found = json.dumps([False, None]).encode()
    answer.send_bytes(found)
