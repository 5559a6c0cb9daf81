"""Trainer and engine that are hosts of their own: each finds the other with the environment that the plan gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import network_nodes
from tests.support.network_nodes import limited_hosts, require_network
from tests.support.workflow_runs import ROOT

from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.flags.sglang_flags import environment_flags
from posttrain.plan.resolve import resolve

SIZE, SECONDS = 1 << 20, 20.0
# What `rl.weight_sync.sharded` does on rank 0, and `posttrain_weights.engine_handlers` in an engine.
MEMBER = f"""
import json, sys
import torch
from posttrain_weights.channel import Channel
from posttrain_weights.transport import Transport, meet
from posttrain_weights.receiver import Inbox
from posttrain_weights.sender import Sender
number, place = json.loads(sys.argv[1])
if number == 0:
    from posttrain.rl.weight_sync.sharded import _meeting_place, _store
    listener, place = _meeting_place()
    print(json.dumps(place), flush=True)
    channel = Channel(_store(listener, place, 2, {SECONDS}), 0, 2, {SECONDS})
    assert channel.ways.way(0, 1) is Transport.HOST
    sender = Sender(channel, {{}}, 0, [])
    sender.begin(0, sender.pack(0, {{1: [torch.arange({SIZE}).to(torch.uint8)[None]]}})).wait()
else:
    channel = Channel(meet(place, 2, {SECONDS}), 1, 2, {SECONDS})
    inbox = Inbox(channel)
    message = inbox.wait(inbox.begin({{0: {SIZE}}}, 0))[0]
    assert torch.equal(message, torch.arange({SIZE}).to(torch.uint8))
print("done", flush=True)
"""


def test_weights_go_from_host_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two addresses gloo connects to the lower one: these are above that of a loopback, which would be it then."""
    require_network()
    monkeypatch.setattr(network_nodes, "NETWORK", "192.168.79")
    words = "engine.kind=sglang engine.own_nodes=1 site.network_interface=eth0"
    choice = {"model": "tiny", "nodes": 2, "site": "example_slurm", "set": words}
    config = resolve(choice, Path(ROOT) / "config").config
    with limited_hosts(2, megabits=1000) as hosts:
        environments = [as_environment(flags) for flags in (trainer_environment(config), environment_flags(config))]
        environments[0] |= {"MASTER_ADDR": hosts[0].address}
        members: list[subprocess.Popen] = []
        place = None
        for number, (host, own) in enumerate(zip(hosts, environments, strict=True)):
            command = (sys.executable, "-c", MEMBER, json.dumps([number, place]))
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            members.append(host.start(*command, env={**os.environ, **own}, **pipes))
            if number == 0:
                place = json.loads(members[0].stdout.readline())
        try:
            ends = [member.communicate(timeout=3 * SECONDS) for member in members]
        finally:
            for member in members:
                member.kill()
    assert place[0] == hosts[0].address
    assert [member.returncode for member in members] == [0, 0], ends
