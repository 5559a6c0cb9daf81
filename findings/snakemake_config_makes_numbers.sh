#!/bin/bash
# snakemake 9.27.1, Python 3.11.
#
# --config parses every value as int, then float, then bool, then YAML: a name that Python could read as a number is one.
# `run=12e4567` is infinity, `run=1_000` the number 1000, `run=007` the number 7. Quotes are removed before, so they do
# not help, and the text that was typed is gone. One would expect YAML's rules (in which 12e4567 is text), or a way to
# quote. Here: names must be text, and the message points to a file for --configfile, where quotes work.
#
# Seen on 2026-11-28:
#   12e4567 -> inf
#   '12e4567' -> inf
#   1_000 -> 1000
#   007 -> 7
#   on -> 'on'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet snakemake==9.27.1
printf 'open("seen", "w").write(repr(config["run"]))\nrule all:\n    output: "done"\n' > "$folder/Snakefile"
cd "$folder"
output=$(for value in 12e4567 "'12e4567'" 1_000 007 on; do
  "$folder/venv/bin/snakemake" --quiet all --dry-run --config "run=$value" > /dev/null 2>&1
  echo "$value -> $(cat seen)"
done)
echo "$output"
[ "$output" = "12e4567 -> inf
'12e4567' -> inf
1_000 -> 1000
007 -> 7
on -> 'on'" ]
