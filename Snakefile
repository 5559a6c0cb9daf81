# End-to-end RL post-training. Each include is one phase, in the order of the data flow.
import logging

from snakemake.utils import min_version

min_version("9.27")
# Without this, tracebacks of Snakemake's own log would hide the terminal's output on a full disk.
logging.raiseExceptions = False


# To `snakemake --lint`, "Specify a conda environment or container for each rule": all rules share the environment that
# starts them (`make env`), or the site's image, which their commands and the nodes enter (`site.container`).

# The folder of this file, also if it is a module of another workflow.
CLONE = workflow.current_basedir.get_path_or_uri(secret_free=True)


configfile: f"{CLONE}/config/workflow.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/resolve.smk"


rule all:
    """The report of a run, or the export of a checkpoint that another trainer made."""
    default_target: True
    input:
        RESULTS,


include: "workflow/rules/download.smk"
include: "workflow/rules/patch.smk"
include: "workflow/rules/convert.smk"
include: "workflow/rules/adopt.smk"
include: "workflow/rules/calibrate.smk"
include: "workflow/rules/quantize.smk"
include: "workflow/rules/stage.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/store.smk"
include: "workflow/rules/hooks.smk"
