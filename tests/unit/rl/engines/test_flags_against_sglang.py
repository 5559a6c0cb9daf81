"""Every command line that is rendered, parsed by the pinned SGLang itself: a renamed, unknown or deprecated flag, a
value it does not know, or a variable it does not read fails here and not on the cluster. One process for all."""

from __future__ import annotations

import pytest
from tests.support.flag_cases import flag_cases
from tests.support.sglang_environment import require_sglang, run_in_sglang

from posttrain.plan.flags.flag import Flag, as_arguments
from posttrain.plan.flags.sglang_flags import environment_flags, roles, sglang_flags

pytestmark = pytest.mark.sglang

PARSE = """
import argparse, contextlib, io, json, sys
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
options = {option: action for action in parser._actions for option in action.option_strings}
given = json.load(sys.stdin)
for argv in given["command_lines"]:
    errors, values = io.StringIO(), {}
    try:
        with contextlib.redirect_stderr(errors):
            parsed = prepare_server_args(["--model-path", "/m", *argv])
        names = [word for word in argv if word.startswith("--")]
        values = {name: getattr(parsed, options[name].dest) for name in names if name in options}
        error = ""
    except SystemExit:
        error = errors.getvalue()
    print("RESULT " + json.dumps({"error": error, "values": values}))
known = {name: name in vars(type(envs)) for name in given["variables"]}
deprecated = [name for name in options if "deprecated" in (options[name].help or "").lower()[:40]]
print("RESULT " + json.dumps({"known": known, "deprecated": deprecated}))
"""
# A recipe's older spellings, which this version refuses.
REFUSED = (
    ("--nsa-prefill-backend", "flashmla_sparse"),
    ("--cuda-graph-max-bs", "256"),
    ("--moe-runner-backend", "flashinfer_trtlm"),
)


@pytest.fixture(scope="module")
def commands() -> dict[str, list[Flag]]:
    """Return "case role" -> flags of every SGLang server of every case."""
    return {
        f"{name} {role}": sglang_flags(resolved.config, role)
        for name, resolved in flag_cases().items()
        if resolved.config.engine.kind == "sglang"
        for role in roles(resolved.config)
    }


@pytest.fixture(scope="module")
def variables() -> set[str]:
    """Return the variables of all engines that are SGLang's own."""
    configs = [resolved.config for resolved in flag_cases().values() if resolved.config.engine.kind == "sglang"]
    rendered = {item.name for config in configs for role in roles(config) for item in environment_flags(config, role)}
    return {name for name in rendered if name.startswith("SGLANG_")}


@pytest.fixture(scope="module")
def answers(commands, variables):
    require_sglang()
    lines = [as_arguments(flags) for flags in commands.values()] + list(REFUSED)
    return run_in_sglang(PARSE, {"command_lines": lines, "variables": sorted(variables)})


def test_each_is_parsed_to_the_values_meant(commands, answers):
    assert len(commands) > 40
    for (name, flags), answer in zip(commands.items(), answers, strict=False):
        assert answer["error"] == "", name
        assert answer["values"] == {item.name: item.value for item in flags}, name


def test_no_flag_is_deprecated(commands, answers):
    used = {item.name for flags in commands.values() for item in flags}
    assert "--enable-dp-attention" in answers[-1]["deprecated"]
    assert not used & set(answers[-1]["deprecated"])


def test_its_variables_are_read(variables, answers):
    known = answers[-1]["known"]
    assert set(known) == variables
    assert len(known) >= 4
    # Read by the launcher of the CPU engine before the table of variables exists.
    assert {name for name, is_known in known.items() if not is_known} <= {"SGLANG_USE_CPU_ENGINE"}


def test_the_older_spellings_are_refused(commands, answers):
    for flag, answer in zip(REFUSED, answers[len(commands) : -1], strict=True):
        assert answer["error"], flag
