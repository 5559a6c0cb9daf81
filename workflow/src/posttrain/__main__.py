"""`posttrain`, or `python -m posttrain`: commands that read, compute or compare. Only Snakemake makes artefacts.

Each command is a module of `posttrain.commands` or of an annex. It is imported only when it runs, and the Snakemake
alias of the same name runs the same module.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain.cli import RESOLVED, add_option, run
from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.config.load import Resolved
from posttrain.config.serving_benchmark import CONCURRENCIES
from posttrain.rl.training.lineage import refuse_other_run
from posttrain.store import Paths
from posttrain.store.group_permissions import announce_sharing

COMMANDS = {
    "plan": "memory, storage, durations and flags of a configuration, as a page; what cannot run fails",
    "rehearse": "two training steps at full size without a GPU: what would fail, hang or not fit on GPUs",
    "check": "what this machine lacks for a run",
    "check-data": "what prompts, labels, tokenizer and graders say of each other; what is to be trained is shown",
    "status": "where runs stand, and jobs in the queue; run=NAME shows one",
    "snapshot": "the report of a run as far as it is",
    "attach": "wait for training that goes on without its driver",
    "replay": "train a step of run=NAME again on its stored rollout, and compare the bits",
    "preflight": "what is wrong with the nodes that this job has; `snakemake preflight` asks a scheduler for them",
    "verify": "prove where every byte of a run came from",
    "verify-store": "prove where every byte of the checkpoints came from, before training",
    "gc": "what of the store no run needs",
    "serve": "how a run's export, or any checkpoint, is served on a machine; or serve it here",
    "benchmark": "how fast an endpoint answers, by requests in flight; `snakemake benchmark_serving` measures a run",
    "model": "a model's file from a checkpoint's config.json",
    "import-flags": "a configuration from a launch script of slime or miles, and what of it has no key here",
}
# Modules of annexes: packages next to `posttrain` that an installation may lack.
ANNEXES = {
    "rehearse": "posttrain_rehearsal.command",
    "serve": "posttrain_serving.command",
    "benchmark": "posttrain_serving.benchmark.command",
    "import-flags": "posttrain_import.command",
}
# These commands find a run by its name and need no further configuration.
LOOKS = ("status", "snapshot", "attach", "gc", "replay")
# These commands take no configuration: two write a part of one, one serves a checkpoint, one measures an endpoint.
MAKES, DESCRIBES, SERVES, MEASURES = "import-flags", "model", "serve", "benchmark"
ALONE = (MAKES, DESCRIBES, SERVES, MEASURES)
_SIZES_ONLY: dict[str, dict[str, Any]] = {
    "--sizes-only": {"action": "store_true", "help": "compare names and sizes, read no content"},
}
# Arguments of a command besides the configuration.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "plan": {"--jobs-at-once": {"type": int, "help": "jobs that run side by side; by default all of a rule"}},
    "check": {"--output": {"type": Path, "help": "JSON with the findings, written when all is well"}},
    "verify": _SIZES_ONLY,
    "verify-store": _SIZES_ONLY,
    "replay": {"--step": {"type": int, "help": "its number, from 1; by default the newest"}},
    "gc": {"--delete": {"action": "store_true", "help": "delete what is unused, as gc=delete does"}},
    DESCRIBES: {
        "folder": {"type": Path, "metavar": "FOLDER", "help": "a checkpoint in Hub layout, or its config.json alone"},
        "name": {"nargs": "?", "metavar": "NAME", "help": "of the model; by default the folder's"},
        "--output": {"type": Path, "help": "configs/models/NAME.yaml, for example; by default it is printed"},
    },
    MAKES: {
        "script": {"type": Path, "metavar": "SCRIPT", "help": "a launch script in bash or Python; it is never run"},
        "--output": {"type": Path, "help": "YAML that --configfile reads; by default it is printed"},
    },
    SERVES: {
        "--print": {"action": "store_true", "dest": "shows", "help": "show commands, files and reasons; start nothing"},
        "--check": {
            "metavar": "ADDRESS",
            "dest": "checks",
            "help": "hold a running server against the export's canary",
        },
        "--stop": {"action": "store_true", "dest": "stops", "help": "end the server of that name, or the only one"},
        "--engine": {"choices": ("sglang", "vllm", "trtllm", "embedded"), "default": "sglang"},
        "--hardware": {"default": "", "help": "a file of config/hardware; by default what the model's file names"},
        "--nodes": {"type": int, "help": "by default as few as are needed"},
        "--precision": {"choices": ("bf16", "fp8", "nvfp4"), "help": "by default that of the checkpoint"},
        "--goal": {"choices": ("latency", "throughput"), "default": "latency", "help": "few requests, or many"},
        "--host": {"help": "address to listen on; by default this machine's own"},
        "--port": {"type": int, "help": "by default 8000"},
        "--python": {"help": "interpreter of SGLang's environment; by default the first on PATH"},
        "--name": {"help": "what clients call the model"},
        "--prefill-apart": {"action": "store_true", "help": "engines that only prefill, and others that decode"},
        "--index-cache": {"action": "store_true", "help": "GLM-5's layers share choices of keys; costs accuracy"},
    },
    MEASURES: {
        "url": {"metavar": "URL", "help": "http://HOST:PORT of an OpenAI-compatible endpoint"},
        "--model": {"required": True, "help": "what the endpoint calls the model"},
        "--checkpoint": {
            "default": "",
            "help": "what it has to serve, a run or a folder: held against its canary before anything counts; "
            "by default MODEL, where that is a folder",
        },
        "--chat": {"action": "store_true", "help": "/v1/chat/completions instead of /v1/completions; with --dataset"},
        "--dataset": {"type": Path, "help": "prompts in lines of JSON, or ShareGPT's; by default random tokens"},
        "--input-tokens": {"type": int, "default": 2048, "help": "length of random prompts (2048)"},
        "--vocabulary": {"type": int, "default": 32000, "help": "random token ids are below this (32000)"},
        "--output-tokens": {"type": int, "default": 512, "help": "length of every response (512)"},
        "--concurrency": {
            "type": int,
            "nargs": "+",
            "default": CONCURRENCIES,
            "help": "requests in flight (1 to 1024)",
        },
        "--requests-per-client": {"type": int, "default": 4, "help": "one after the other (4)"},
        "--temperature": {"type": float, "default": 0.0, "help": "0, the default, takes the likeliest token"},
        "--seed": {"type": int, "default": 1, "help": "of prompts and sampling (1)"},
        "--name": {"default": "", "help": "what tables and pictures call it"},
        "--beside": {"nargs": "+", "default": [], "help": "CSV files of other tables; `published`: GLM-5 on B200"},
        "--output": {"type": Path, "default": Path("serving.json"), "help": "JSON; CSV and page lie beside it"},
    },
}
SUBJECTS = {
    MAKES: "SCRIPT ",
    DESCRIBES: "FOLDER [NAME] ",
    SERVES: "[CHECKPOINT] ",
    MEASURES: "URL --model NAME ",
}
DESCRIPTION = "Looks at runs and plans; what is to be made, `snakemake` makes (`snakemake --list`)."
KEYS = """\
KEY=VALUE, the words that follow `snakemake --config`:
  model= nodes= hardware= site= recipe=   a file of config/, or of configs=FOLDER; `nodes` is a number
  run=NAME fork=RUN@STEP                  a run by its name; another one's state to begin with
  set='KEY=VALUE KEY=VALUE'               values; config/README.md tells all keys
"""
EPILOG = f"{KEYS}\n`posttrain COMMAND --help` tells what else a command takes."
_Raw = argparse.RawDescriptionHelpFormatter


def main() -> None:
    """Run one command and exit with 0, or with 1 and a message."""
    sys.argv[0] = "posttrain"  # The name in messages, however the command was started.
    run(_answer)


def _answer() -> None:
    options = _parse_arguments()
    if options["command"] == MAKES:
        _command(MAKES).main(options["config"], options["script"], options["output"])
        return
    if options["command"] == DESCRIBES:
        _command(DESCRIBES).main(options["folder"], options["name"], options["output"])
        return
    if options["command"] == MEASURES:
        del options["command"], options["config"]
        _command(MEASURES).main(**options)
        return
    if options["command"] == SERVES:
        del options["command"]
        os.chdir(options.pop("directory"))
        words, files = options.pop("config"), options.pop("configfile")
        names = [word for word in words if "=" not in word]
        settings = [word for word in words if word not in names]
        _command(SERVES).main(settings, files, " ".join(names), **options)
        return
    command, folder, resolved, files, words = (
        options.pop(key) for key in ("command", "directory", "resolved", "configfile", "config")
    )
    request = {} if resolved else read_request(CONFIG_DIR, files, words)
    os.chdir(folder)
    paths = Paths(resolved or _resolve(request))
    announce_sharing(paths.store, paths.resolved.config.site.store_group)
    if command not in LOOKS:
        refuse_other_run(paths)
    _command(command).main(paths, **options)


def module_of(command: str) -> str:
    """Return the dotted name of a command's module."""
    return ANNEXES.get(command, f"posttrain.commands.{command.replace('-', '_')}")


def _command(name: str) -> Any:
    return importlib.import_module(module_of(name))


def _is_installed(name: str) -> bool:
    return name not in ANNEXES or find_spec(ANNEXES[name].partition(".")[0]) is not None


def _resolve(request: dict[str, Any]) -> Resolved:
    # A configuration resolved by a job needs no planner.
    from posttrain.plan.resolve import resolve

    return resolve(request, CONFIG_DIR)


def _parse_arguments() -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="posttrain", description=DESCRIPTION, epilog=EPILOG, formatter_class=_Raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        if not _is_installed(name):
            continue
        subject = SUBJECTS.get(name, "")
        usage = f"posttrain {name} {subject}[OPTION ...] [KEY=VALUE ...]"
        rule = [name.replace("-", "_")] if "-" in name else []
        command = commands.add_parser(
            name, help=line, description=line, usage=usage, epilog=KEYS, formatter_class=_Raw, aliases=rule
        )
        command.add_argument("--config", nargs="*", action="extend", default=[], help=argparse.SUPPRESS)
        if name not in (MAKES, DESCRIBES, MEASURES):
            command.add_argument("--configfile", type=Path, action="append", default=[], help="a YAML file of these")
            command.add_argument("-d", "--directory", type=Path, default=Path(), help="working folder, as Snakemake's")
        if name not in ALONE:
            add_option(command, "resolved", RESOLVED, required=False)
        for option, declared in OPTIONS.get(name, {}).items():
            command.add_argument(option, **declared)
    arguments, words = parser.parse_known_args()
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.config += words
    # The alias has underscores instead of hyphens.
    arguments.command = arguments.command.replace("_", "-")
    return vars(arguments)


if __name__ == "__main__":
    main()
