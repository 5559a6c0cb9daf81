"""Every command line that is shown, parsed by the engine itself: SGLang 0.5.23, and vLLM 0.32.0 where it is installed.

TensorRT-LLM's is parsed by nobody here.
"""

from __future__ import annotations

import subprocess

import pytest
from tests.support.serving_cases import SGLANG, VLLM, launches
from tests.support.sglang_environment import require_sglang, run_in_sglang
from tests.support.vllm_environment import PYTHON, require_vllm, run_in_vllm
from tests.unit.rl.engines.test_flags_against_sglang import PARSE as PARSE_BY_SGLANG

from posttrain.plan.flags.flag import as_arguments
from posttrain_serving.flags.serving_flags import RENAMED
from posttrain_serving.launch import Process

PARSE_BY_VLLM = """
import contextlib, io, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
options = {option: action for action in parser._actions for option in action.option_strings}
for argv in json.load(sys.stdin):
    errors, values = io.StringIO(), {}
    try:
        with contextlib.redirect_stderr(errors):
            parsed = parser.parse_args(argv)
            validate_parsed_serve_args(parsed)
        names = [word for word in argv if word.startswith("--")]
        values = {name: getattr(parsed, options[name].dest) for name in names}
        error = ""
    except (SystemExit, TypeError, ValueError) as found:
        error = errors.getvalue() or str(found) or "refused"
    print("RESULT " + json.dumps({"error": error, "values": values}))
"""
ROUTER = "sglang_router.launch_router"


def processes(cases: dict[str, object]) -> list[tuple[str, Process]]:
    """Return (case and place, process) of every engine."""
    return [
        (f"{name} {place}", process)
        for name in cases
        for place, process in enumerate(launches()[name].processes)
        if ROUTER not in process.program
    ]


@pytest.mark.sglang
def test_sglang_parses_each_to_the_values_meant() -> None:
    require_sglang()
    given = processes(SGLANG)
    old = [words.split() for words, fate in RENAMED.values() if fate == "refuses"]
    lines = [as_arguments(process.flags)[2:] for _, process in given] + [[*words, "trtllm"] for words in old]
    *answers, known = run_in_sglang(PARSE_BY_SGLANG, {"command_lines": lines, "variables": []})
    assert len(given) > 20
    for (name, process), answer in zip(given, answers, strict=False):
        assert answer["error"] == "", name
        expected = {item.name: item.value for item in process.flags if item.name != "--model-path"}
        served = answer["values"].pop("--served-model-name")
        assert answer["values"] | {"--served-model-name": served} == expected, name
        assert not expected.keys() & set(known["deprecated"])
    refused = answers[len(given) :]
    assert len(refused) == 2
    assert all(answer["error"] for answer in refused), "older spellings are told as refused"
    deprecated = {words.split()[0] for words, fate in RENAMED.values() if fate == "deprecates"}
    assert deprecated <= set(known["deprecated"])


@pytest.mark.vllm
def test_vllm_parses_each_to_the_values_meant() -> None:
    require_vllm()
    given = processes(VLLM)
    wrong = ["--model", "x", "--enable-auto-tool-choise"]
    *answers, misspelled = run_in_vllm(
        PARSE_BY_VLLM, [["--model", process.program[2], *as_arguments(process.flags)] for _, process in given] + [wrong]
    )
    assert len(given) == 6
    for (name, process), answer in zip(given, answers, strict=True):
        assert answer["error"] == "", name
        meant = {item.name: item.value for item in process.flags} | {"--model": process.program[2]}
        meant |= {"--served-model-name": [meant["--served-model-name"]]}
        meant |= {"--gpu-memory-utilization": float(meant["--gpu-memory-utilization"])}
        assert answer["values"] == meant, name
    assert misspelled["error"]


@pytest.mark.vllm
def test_the_router_takes_what_it_is_told() -> None:
    require_vllm()
    *_, router = launches()["prefill-apart"].processes
    code = "import sys; from sglang_router.launch_router import parse_router_args as parse; parse(sys.argv[1:])"
    for more, code_of_end in (((), 0), (("--decoed", "x"), 2)):
        command = [PYTHON, "-c", code, *as_arguments(router.flags), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code_of_end, done.stderr
