# Loads and checks the configuration, and names paths. Invalid input ends here, before any rule, with all problems.
import atexit
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from snakemake.logging import logger

from posttrain import store
from posttrain.__main__ import COMMANDS
from posttrain.store import FORMAT_VERSIONS, Paths, part_receipt_of, read_receipt, receipt_of
from posttrain.store.data_folders import pass_folders, suite_folders
from posttrain.store.resolved_file import read_resolved, write_resolved
from posttrain.store.group_permissions import announce_sharing, share_store
from posttrain.config.legacy_runs import kept_from_before
from posttrain.config.command_line import check_files, with_defaults
from posttrain.config.derived import engines_load, recoding_settings
from posttrain.config.sandbox_needs import needs_sandbox
from posttrain.config.site_rules import check_preflight
from posttrain.plan.resolve import resolve
from posttrain.plan.job_needs import RuleNeeds, job_needs
from posttrain.errors import CheckpointError, ConfigError, Problem, explain, raise_if_any
from posttrain.cluster.processes import name_driver
from posttrain.rl.data.local_check import check_data_files
from posttrain.cluster.container import make_shared_roots, prefix_of_jobs
from posttrain.cluster.driver import Ending, notify
from posttrain.cluster.old_rules import find_old_rules, find_old_rules_of_dag
from posttrain.cluster.slurm_job import resources_of_all_jobs, resources_of_serving, resources_of_training
from posttrain.plan.preflight.nvfp4 import refuse_unservable
from posttrain.plan.preflight.refusals import refusal, refuse_unfit
from posttrain.plan.preflight.storage import require_writable
from posttrain.readable import counted
from posttrain.plan.rehearsal_record import describe_rehearsal
from posttrain.rl.training.lineage import refuse_other_run

IS_READ_AGAIN = name_driver()
# Waiting threads must not spin, because jobs share few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# To `snakemake --lint`, "Environment variable PATH used but not asserted with envvars directive": it is extended only.
# Steps run in the environment that runs Snakemake, whether or not a shell has activated it (envs/README.md).
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
ENDING = Ending(shows_commands=workflow.output_settings.printshellcmds)
if workflow.is_main_process:
    ENDING.watch(logger)
# Valid from any working directory.
CONFIG_DIR = os.path.relpath(os.path.join(CLONE, "config"))
# Names the file in which jobs find the configuration that was resolved when the command was given.
RESOLVED_VARIABLE = "POSTTRAIN_RESOLVED"


@contextlib.contextmanager
def told():
    """Print errors and exit: Snakemake would show an exception with a place in a rule, where the mistake is not."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        logger.error(str(error))
        sys.exit(1)


def write_once(resolved):
    """Write the resolved configuration for the jobs of this command, and return its path."""
    try:
        return write_resolved(resolved, Path("logs/configs"))
    except OSError:
        # Commands that only read may run on a full disk or in another user's folder; `onstart` rejects others.
        folder = Path(tempfile.mkdtemp(prefix="posttrain-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return write_resolved(resolved, folder)


with told():
    # A job reads the configuration resolved at submission, even if config/ has changed since.
    if workflow.is_main_process:
        # A module with a `config:` takes its configuration from the outer workflow, not from --configfile.
        check_files([] if workflow.modifier.skip_configfile else workflow.config_settings.configfiles)
        REQUEST = with_defaults(config, Path(CONFIG_DIR))
        RESOLVED = resolve(REQUEST, Path(CONFIG_DIR))
    elif RESOLVED_VARIABLE in os.environ:
        RESOLVED = read_resolved(Path(os.environ[RESOLVED_VARIABLE]))
    else:
        raise CheckpointError(f"{RESOLVED_VARIABLE} is not set: this executor does not hand the environment on to jobs")
    if workflow.is_main_process:
        raise_if_any(find_old_rules(sys.argv[1:], workflow.resource_settings))
    PATHS = Paths(RESOLVED)
    announce_sharing(PATHS.store, RESOLVED.config.site.store_group)
CFG = RESOLVED.config
if workflow.is_main_process:
    if kept := kept_from_before(RESOLVED):
        logger.info(f"{RESOLVED.run} goes on as an older version began it: {kept}; name another value for a new run")
    file = str(write_once(RESOLVED))
    if IS_READ_AGAIN and os.environ[RESOLVED_VARIABLE] != file:
        with told():
            # A queued job parses the whole workflow again, and would mistake one configuration for the other.
            remedy = "give each a workflow of its own, or one `config:`"
            raise ConfigError(
                [Problem("one-configuration", "module", "two configurations of posttrain", "one in a workflow", remedy)]
            )
    os.environ[RESOLVED_VARIABLE] = file
RESOLVED_FILE = os.environ[RESOLVED_VARIABLE]


@functools.cache
def may_run():
    """Return no files, or reject a run that is invalid or that began with another experiment.

    Rules of a run have it as input, so Snakemake calls it when one of them is needed, also in a dry run. Status, plans
    and steps of the store skip these checks.
    """
    if workflow.is_main_process:
        with told():
            raise_if_any(find_old_rules_of_dag(workflow.dag_settings))
            refuse_other_run(PATHS)
            refuse_unfit(PATHS)
    return []


def may_read(files):
    """Return the files with data rows, or reject data with invalid keys or first rows."""
    if workflow.is_main_process:
        with told():
            raise_if_any(data_file_problems())
    return files


def with_times(text, files):
    """Return a parameter with sizes and times of local files: a replaced file may be older than the first one."""
    statuses = [(path, path.stat()) for path in files if path.exists()]
    return "".join([text, *(f" {path} {status.st_size} {int(status.st_mtime)}" for path, status in statuses)])


@functools.cache
def data_file_problems():
    return check_data_files(CFG)


def may_look_at_nodes():
    """Return no files, or reject a preflight that this configuration cannot run without training."""
    with told():
        raise_if_any(list(check_preflight(CFG)))
    return may_run()


def may_serve(quantized):
    """Return no files, or reject quantising unsuitable weights for serving, when a folder of that name is needed."""
    if quantized == PATHS.serving.name and workflow.is_main_process:
        with told():
            refuse_unservable(PATHS)
    return []


def refused():
    """Return why this version cannot run the planned jobs; empty if it can."""
    rules = {job.rule.name for job in workflow.dag.needrun_jobs(exclude_finished=False)} if workflow.dag else set()
    return refusal(REQUEST, Path(CONFIG_DIR), CFG, rules)


# Whether it is a dry run is only known after this file is parsed.
ENDING.add(lambda: refused() if workflow.dryrun else "")


# Site-wide resources of a cluster; without a scheduler there are no defaults.
if workflow.resource_settings.default_resources is not None:
    for name, value in resources_of_all_jobs(CFG.site).items():
        workflow.resource_settings.default_resources[name] = value


def literal(text):
    """Return a text as a word of a shell command, without Snakemake wildcards."""
    return shlex.quote(str(text)).replace("{", "{{").replace("}", "}}")


def settings_of(*sections):
    """Return sections of the configuration as a parameter, whose change repeats a rule."""
    return json.dumps([dataclasses.asdict(section) for section in sections])


def runs(name, *words, where="", around=""):
    """Return a rule's command: launcher, the script of its name or `posttrain`'s command, and its words.

    What stands around all of this may have names of the rule's own. All names of this file stand in it already, as Snakemake does not know them where another workflow uses the rules.
    """
    script = os.path.relpath(os.path.join(CLONE, "scripts", f"{name}.py"))
    command = name.replace("_", "-")
    # -P: modules must not be imported from the working folder, as for scripts.
    program = f"-P -m posttrain {command}" if command in COMMANDS else literal(script)
    starter = where.replace("{", "{{").replace("}", "}}")
    return " ".join([f"POSTTRAIN_LOG={{log:q}} {around}{starter}python {program}", *words])


# The option with the whole configuration.
FROM_CONFIG = f"--resolved {literal(RESOLVED_FILE)}"
# The needs of a job, appended to its message.
NEEDS = RuleNeeds(CFG)
NODES = counted(CFG.nodes, "node")
REHEARSED = [describe_rehearsal(PATHS)["state"]] if CFG.hardware.device == "cuda" else []
SUITE_FOLDERS, PASS_FOLDERS = suite_folders(CFG), pass_folders(CFG)
ARCHITECTURE = json.dumps(RESOLVED.experiment["model"]["architecture"])
# With pods, this machine creates the JobSets of commands that need GPUs, and follows them.
ON_PODS = f"python -m posttrain.cluster.on_kubernetes --resolved {shlex.quote(RESOLVED_FILE)}"
HAS_PODS = CFG.site.launcher == "kubernetes"
ON_ALL_NODES = f"{ON_PODS} --num-nodes {CFG.nodes} -- " if HAS_PODS else ""
# Jobs start in the site's image, except Snakemake's own and training, which starts its nodes in it.
IN_IMAGE = prefix_of_jobs(CFG)
# Evaluations start their engines on one node, or run with engines on several (`beside_engines`).
SERVING_NODES = job_needs(CFG, "evaluate").nodes
STARTS_ENGINES = SERVING_NODES == 1 and not CFG.evaluation.addresses
ON_ONE_NODE = f"{ON_PODS} --num-nodes 1 -- " if HAS_PODS else IN_IMAGE
WHERE_SERVED = ON_ONE_NODE if STARTS_ENGINES else IN_IMAGE
EVALUATIONS = literal(PATHS.run / "evaluation")
SIZE = CFG.model.source.repo_id or CFG.model.name
# Default targets.
if CFG.export.checkpoint_folder:
    RESULTS = [receipt_of(PATHS.export_check)]
else:
    RESULTS = [PATHS.run / "summary.json", PATHS.run / "report.html"]


def beside_engines(folder):
    """Return the prefix that starts engines on all nodes of a rule's job; empty if the command starts its own.

    `folder` gets their logs, as words of a shell command.
    """
    if SERVING_NODES == 1:
        return ""
    on_pods = f"{ON_PODS} --num-nodes {SERVING_NODES} -- ".replace("{", "{{").replace("}", "}}") if HAS_PODS else ""
    words = f"{FROM_CONFIG} --checkpoint {{params.checkpoint:q}} --folder {folder}"
    return f"{on_pods}python -m posttrain.cluster.beside_engines {words} -- "


def parts_of(folder, num_parts):
    """Return a folder's parts; a finished folder keeps its number of parts, whatever is configured now.

    Parts of different splits do not fit together, and Snakemake's records of the first may be in another user's folder.
    """
    made = sorted(part_receipt_of(folder, 0).parent.glob("*.receipt.json")) if receipt_of(folder).exists() else []
    for receipt in made:
        # A damaged receipt is reported by the step that reads it.
        with contextlib.suppress(CheckpointError):
            found = read_receipt(receipt).settings.get("num_parts")
            if isinstance(found, int) and found > 0:
                return range(found)
    return range(num_parts)


def tell(state):
    """Run the site's command when a run ends; status and plans do not count as runs."""
    if any(job.output for job in workflow.dag.needrun_jobs(exclude_finished=False)):
        notify(CFG.site.end_command, PATHS.run, state, "\n\n".join(ENDING.words()))


def until_made(product, path):
    """Return an input that a product needs only until it exists, and that never triggers it again.

    With `ancient` alone, Snakemake ignores all other reasons to make the product, even its absence, while the input's
    job runs. So the input is not requested once the product exists.
    """
    return before_update(ancient(path)) if product.exists() and path.exists() else path


EXPORT_CHECKED = receipt_of(PATHS.export_check)


def checked_before(when, result):
    """Return the check of the export, which precedes every evaluation of the trained model."""
    return until_made(result, EXPORT_CHECKED) if when == "after" else []


wildcard_constraints:
    part=r"\d+",
    node=r"[A-Za-z0-9._-]+",
    when="before|after",
    precision="[a-z0-9]+",
    rows=r"(suite|pass)-[0-9a-f]{8}(-v[0-9.]+)?",
