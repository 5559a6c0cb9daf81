# End-to-end RL post-training: the table of contents. Each include is one phase, in the order in which data flows.
import logging

from snakemake.utils import min_version

min_version("9.27")
# Snakemake's own log on a full disk must not bury what the terminal shows under tracebacks; it speaks from here on.
logging.raiseExceptions = False


configfile: f"{workflow.basedir}/config/workflow.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/resolve.smk"


rule all:
    default_target: True
    input:
        RESULTS,


include: "workflow/rules/download.smk"
include: "workflow/rules/patch.smk"
include: "workflow/rules/convert.smk"
include: "workflow/rules/adopt.smk"
include: "workflow/rules/quantize.smk"
include: "workflow/rules/stage.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/store.smk"
include: "workflow/rules/hooks.smk"
