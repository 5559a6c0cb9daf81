"""What this package says to SGLang, held against SGLang 0.5.23 itself (no server; those are end-to-end
tests)."""

from pathlib import Path

import pytest
import torch
from tests.sglang_environment import require_sglang, run_in_sglang

from posttrain.config.load import resolve
from posttrain.engines.launch_command import render_engine_command
from posttrain.engines.responses import NO_WEIGHTS
from posttrain.engines.tensor_payload import serialize_bucket

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.sglang

READ_PAYLOAD = """
import json, sys
from sglang.srt.utils import MultiprocessingSerializer
tensors = MultiprocessingSerializer.deserialize(json.load(sys.stdin))
print("RESULT", json.dumps([[name, str(t.dtype), list(t.shape), t.float().flatten().tolist()] for name, t in tensors]))
"""
PARSE_FLAGS = """
import json, sys
from sglang.srt.server_args import prepare_server_args
for argv in json.load(sys.stdin):
    parsed = prepare_server_args(argv)
    parallel = [parsed.tp_size, parsed.attn_dp_size, parsed.page_size, parsed.device]
    print("RESULT", json.dumps([*parallel, parsed.load_format, parsed.weight_version]))
"""


@pytest.fixture(autouse=True)
def environment():
    require_sglang()


def test_its_unpickler_reads_our_payload():
    values = torch.tensor([[1.5, -2.0], [0.25, 448.0]])
    bucket = [
        ("a", values),
        ("b", values.bfloat16()),
        ("c", values.to(torch.float8_e4m3fn)),
        ("d", values.t()),
    ]
    (read,) = run_in_sglang(READ_PAYLOAD, serialize_bucket(bucket))
    assert read == [[name, str(t.dtype), [2, 2], t.float().flatten().tolist()] for name, t in bucket]


def test_its_parser_knows_our_flags():
    argv = []
    for workflow in ({"model": "tiny", "set": "engine.kind=sglang"}, {"model": "glm5"}):
        config = resolve({"site": "local", **workflow}, ROOT / "config").config
        command = render_engine_command(
            config, 0, Path("/m"), "127.0.0.1", 30000, first_node="node0:5000", without_weights=True
        )
        argv.append(command.argv[3:])
    on_cpu, on_cuda = run_in_sglang(PARSE_FLAGS, argv)
    assert on_cpu[0] == 1
    assert on_cpu[3] == "cpu"
    assert on_cuda[:3] == [64, 64, 64]
    assert on_cpu[4:] == on_cuda[4:] == ["dummy", NO_WEIGHTS]
