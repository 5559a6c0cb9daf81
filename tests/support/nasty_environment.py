"""An environment that does what each action's content says, such as "exit" or "hang"."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time

KEPT: list[object] = []


class Nasty:
    """Its methods may fail in every way that a user's may."""

    def __init__(self, seed):
        if seed == 13:
            raise ValueError("thirteen")
        self.random = random.Random(seed)
        self.said = []

    async def reset(self, row):
        return await self.step({"content": row["label"]}, is_reset=True)

    async def step(self, action, is_reset=False):
        word, _, rest = action["content"].partition(" ")
        answer = [{"role": "user", "content": str(rest or os.getpid())}]
        result = getattr(self, f"do_{word}", lambda rest: None)(rest)
        if asyncio.iscoroutine(result):
            result = await result
        if result is not None:
            return result
        return (answer, None) if is_reset else (answer, False)

    async def reward(self, trajectory):
        return {"nan": float("nan"), "text": "1", "none": None, "parts": {"reward": 0.5, "speed": 2}}.get(
            trajectory["end"], 1
        )

    def do_random(self, rest):
        return [{"role": "user", "content": str(self.random.random())}], False

    def do_raise(self, rest):
        raise KeyError("gold")

    def do_leave(self, rest):
        sys.exit(1)

    def do_exit(self, rest):
        os._exit(3)

    def do_block(self, rest):
        time.sleep(60)

    async def do_hang(self, rest):
        await asyncio.Event().wait()

    async def do_sleep(self, rest):
        await asyncio.sleep(float(rest))

    def do_fill(self, rest):
        KEPT.append(bytearray(1 << 40))

    def do_flood(self, rest):
        return [{"role": "user", "content": "a" * (17 << 20)}], False

    def do_leak(self, rest):
        if rest == "memory":
            KEPT.append(bytearray(300 << 20))
        if rest == "files":
            KEPT.extend(open(os.devnull) for _ in range(100))  # noqa: SIM115
        if rest == "threads":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    def do_child(self, rest):
        child = subprocess.Popen(["sleep", "600"])
        return [{"role": "user", "content": str(child.pid)}], False

    def do_print(self, rest):
        print("hello from the environment")

    def do_read(self, rest):
        return [{"role": "user", "content": repr(sys.stdin.read())}], False

    def do_garbage(self, rest):
        for number in range(3, 64):
            try:
                os.write(number, b"\xff" * 64)
            except OSError:
                continue

    def do_return(self, rest):
        return eval(rest)


class Plain:
    """Plain methods, which may block."""

    def __init__(self, seed):
        self.closed = False

    def reset(self, row):
        return [{"role": "user", "content": "go"}], None

    def step(self, action):
        time.sleep(float(action["content"]))
        return [{"role": "user", "content": "slept"}], False

    def reward(self, trajectory):
        return 0.25

    def close(self):
        print("closed an environment")
