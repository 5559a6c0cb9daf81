#!/usr/bin/env bash
# Snakemake 9.27.1 rejects a rule that does not exist in --until and --forcerun, and silently ignores it in --omit-from,
# --set-resources and --set-threads: exit code 0, and every job is planned.
#
# Expected: all of them reject it, since all of them name rules. Nor can a Snakefile check them all: while it is read,
# `workflow.resource_settings` is there, but `workflow.dag_settings`, with --omit-from, is still None.
#
# Here: a rule that was renamed would lose its resources in a profile without a word. So `cluster/old_rules.py` rejects
# the old name, on the command line when the Snakefile is read, and in a profile when the first job is planned.
#
# Seen on 2026-11-29:
#     --until nosuch: 1, --forcerun nosuch: 1
#     --omit-from nosuch: 0, --set-resources nosuch:mem_mb=1: 0, --set-threads nosuch=2: 0
#     dag settings while the Snakefile is read: None
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet snakemake==9.27.1
cat > Snakefile <<'RULES'
import sys
print("dag settings while the Snakefile is read:", workflow.dag_settings, file=sys.stderr)


rule all:
    output: "made"
    shell: "touch {output}"
RULES
code_of() { env/bin/snakemake --dry-run "$@" > log 2>&1 && echo 0 || echo 1; }
grep -q "is read: None" <(env/bin/snakemake --dry-run 2>&1)
for rejected in "--until nosuch" "--forcerun nosuch"; do
    test "$(code_of $rejected)" = 1
done
for ignored in "--omit-from nosuch" "--set-resources nosuch:mem_mb=1" "--set-threads nosuch=2"; do
    test "$(code_of $ignored)" = 0
    grep -qE "^all +1$" log
done
echo "as described"
