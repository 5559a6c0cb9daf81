# Loads and checks the configuration, and names paths. Wrong input ends here, before any rule, with every problem listed.
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
# A waiting thread must not spin: jobs run side by side on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# To `snakemake --lint`, "Environment variable PATH used but not asserted with envvars directive": it is extended only.
# Steps run in the environment that runs Snakemake, whether or not a shell has activated it (envs/README.md).
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
ENDING = Ending(shows_commands=workflow.output_settings.printshellcmds)
if workflow.is_main_process:
    ENDING.watch(logger)
# Right from any working directory.
CONFIG_DIR = os.path.relpath(os.path.join(CLONE, "config"))
# Where a job finds what was resolved when the command was given.
RESOLVED_VARIABLE = "POSTTRAIN_RESOLVED"


@contextlib.contextmanager
def told():
    """End with what is wrong: an exception would be shown with its place in a rule, which is not where the mistake is."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        logger.error(str(error))
        sys.exit(1)


def write_once(resolved):
    """Write what was resolved for the jobs of this command, and return the file."""
    try:
        return write_resolved(resolved, Path("logs/configs"))
    except OSError:
        # Who only looks may do so on a full disk, or in somebody else's folder; `onstart` refuses the others.
        folder = Path(tempfile.mkdtemp(prefix="posttrain-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return write_resolved(resolved, folder)


with told():
    # A job reads what was planned when the command was given, whatever has become of config/ by then.
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
            # A queued job, which reads the whole workflow again, would take one's configuration for the other's.
            remedy = "give each a workflow of its own, or one `config:`"
            raise ConfigError([Problem("module", "two configurations of posttrain", "one in a workflow", remedy)])
    os.environ[RESOLVED_VARIABLE] = file
RESOLVED_FILE = os.environ[RESOLVED_VARIABLE]


@functools.cache
def may_run():
    """Return no files, or refuse to begin or change a run that cannot be, or that began otherwise.

    Rules of a run have it among their inputs, so Snakemake asks when it finds that one is needed, in a dry run, too. Who
    only looks, plans, or makes what the store holds is not asked what the run learns.
    """
    if workflow.is_main_process:
        with told():
            raise_if_any(find_old_rules_of_dag(workflow.dag_settings))
            refuse_other_run(PATHS)
            refuse_unfit(PATHS)
    return []


def may_read(files):
    """Return the files that rows are read from, or refuse data whose keys or first rows are wrong."""
    if workflow.is_main_process:
        with told():
            raise_if_any(data_file_problems())
    return files


def with_times(text, files):
    """Return a parameter with sizes and times of local files: one that takes another's place may be older than it."""
    statuses = [(path, path.stat()) for path in files if path.exists()]
    return "".join([text, *(f" {path} {status.st_size} {int(status.st_mtime)}" for path, status in statuses)])


@functools.cache
def data_file_problems():
    return check_data_files(CFG)


def may_look_at_nodes():
    """Return no files, or refuse to look at nodes that are not to be had without training."""
    with told():
        raise_if_any(list(check_preflight(CFG)))
    return may_run()


def may_serve(quantized):
    """Return no files, or refuse to quantise for serving what should not be, when a folder of that name is needed."""
    if quantized == PATHS.serving.name and workflow.is_main_process:
        with told():
            refuse_unservable(PATHS)
    return []


def refused():
    """Return what keeps this version from running the jobs that Snakemake has planned, in words; empty where nothing."""
    rules = {job.rule.name for job in workflow.dag.needrun_jobs(exclude_finished=False)} if workflow.dag else set()
    return refusal(REQUEST, Path(CONFIG_DIR), CFG, rules)


# Whether it is a dry run is known only after this file is read.
ENDING.add(lambda: refused() if workflow.dryrun else "")


# They stand in the site's file with all that belongs to a cluster; without a scheduler there are no defaults.
if workflow.resource_settings.default_resources is not None:
    for name, value in resources_of_all_jobs(CFG.site).items():
        workflow.resource_settings.default_resources[name] = value


def literal(text):
    """Return a text as a word of a shell command, in which Snakemake is to look up nothing."""
    return shlex.quote(str(text)).replace("{", "{{").replace("}", "}}")


def runs(name, *words, where="", around=""):
    """Return a command of a rule: what starts it, the script of its name or `posttrain`'s command, and its words.

    What stands around all of this may have names of the rule's own. All names of this file stand in it already, as Snakemake does not know them where another workflow uses the rules.
    """
    script = os.path.relpath(os.path.join(CLONE, "scripts", f"{name}.py"))
    command = name.replace("_", "-")
    # A module does not come from the working folder, as little as a script does.
    program = f"-P -m posttrain {command}" if command in COMMANDS else literal(script)
    starter = where.replace("{", "{{").replace("}", "}}")
    return " ".join([f"POSTTRAIN_LOG={{log:q}} {around}{starter}python {program}", *words])


# What a command takes that is about the configuration as a whole.
FROM_CONFIG = f"--resolved {literal(RESOLVED_FILE)}"
# What a job takes, at the end of its message.
NEEDS = RuleNeeds(CFG)
NODES = counted(CFG.nodes, "node")
REHEARSED = [describe_rehearsal(PATHS)["state"]] if CFG.hardware.device == "cuda" else []
SUITE_FOLDERS, PASS_FOLDERS = suite_folders(CFG), pass_folders(CFG)
ARCHITECTURE = json.dumps(RESOLVED.experiment["model"]["architecture"])
# Where pods run the commands that need GPUs, this machine applies their JobSets and follows them.
ON_PODS = f"python -m posttrain.cluster.on_kubernetes --resolved {shlex.quote(RESOLVED_FILE)}"
HAS_PODS = CFG.site.launcher == "kubernetes"
ON_ALL_NODES = f"{ON_PODS} --num-nodes {CFG.nodes} -- " if HAS_PODS else ""
# Jobs start in the site's image. What Snakemake runs by itself does not, nor training, which brings its nodes into it.
IN_IMAGE = prefix_of_jobs(CFG)
# What evaluates starts its engines itself on one node, or runs beside engines on several (`beside_engines`).
SERVING_NODES = job_needs(CFG, "evaluate").nodes
STARTS_ENGINES = SERVING_NODES == 1 and not CFG.evaluation.addresses
ON_ONE_NODE = f"{ON_PODS} --num-nodes 1 -- " if HAS_PODS else IN_IMAGE
WHERE_SERVED = ON_ONE_NODE if STARTS_ENGINES else IN_IMAGE
EVALUATIONS = literal(PATHS.run / "evaluation")
SIZE = CFG.model.source.repo_id or CFG.model.name
# What is made when no target is named.
if CFG.export.checkpoint_folder:
    RESULTS = [receipt_of(PATHS.export_check)]
else:
    RESULTS = [PATHS.run / "summary.json", PATHS.run / "report.html"]


def beside_engines(folder):
    """Return what starts engines on all nodes of a rule's job around its command; empty where it starts its own.

    The folder is for their logs, as words of a shell command.
    """
    if SERVING_NODES == 1:
        return ""
    on_pods = f"{ON_PODS} --num-nodes {SERVING_NODES} -- ".replace("{", "{{").replace("}", "}}") if HAS_PODS else ""
    words = f"{FROM_CONFIG} --checkpoint {{params.checkpoint:q}} --folder {folder}"
    return f"{on_pods}python -m posttrain.cluster.beside_engines {words} -- "


def parts_of(folder, num_parts):
    """Return a folder's parts: a finished one keeps those it was made in, whatever split is asked for now.

    Parts of two splits do not fit together, and Snakemake's records of the first may lie in somebody else's folder.
    """
    made = sorted(part_receipt_of(folder, 0).parent.glob("*.receipt.json")) if receipt_of(folder).exists() else []
    for receipt in made:
        # A damaged one is told of by the step that reads it.
        with contextlib.suppress(CheckpointError):
            found = read_receipt(receipt).settings.get("num_parts")
            if isinstance(found, int) and found > 0:
                return range(found)
    return range(num_parts)


def tell(state):
    """Let a site's command know how a run has ended; a look at runs, or a plan, is nothing to tell of."""
    if any(job.output for job in workflow.dag.needrun_jobs(exclude_finished=False)):
        notify(CFG.site.end_command, PATHS.run, state, "\n\n".join(ENDING.words()))


def until_made(product, path):
    """Return an input that a product waits for until it is there, and that is no reason to make it again afterwards.

    With `ancient` alone Snakemake looks for no other reason to make the product, not even that it is missing, once the
    job that makes the input runs; so nobody may be asked for the input any more when the product is there.
    """
    return before_update(ancient(path)) if product.exists() and path.exists() else path


EXPORT_CHECKED = receipt_of(PATHS.export_check)


def checked_before(when, result):
    """Return the check of the export, which everything that measures the trained model waits for."""
    return until_made(result, EXPORT_CHECKED) if when == "after" else []


wildcard_constraints:
    part=r"\d+",
    node=r"[A-Za-z0-9._-]+",
    when="before|after",
    precision="[a-z0-9]+",
    rows=r"(suite|pass)-[0-9a-f]{8}(-v[0-9.]+)?",
