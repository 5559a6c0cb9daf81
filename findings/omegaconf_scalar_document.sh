#!/bin/bash
# omegaconf 2.4.0, Python 3.11.
#
# OmegaConf.load of a YAML file that holds one word and nothing else returns a mapping with that word as a key and None
# as its value. One would expect an error, as for a file that holds a number. A file whose colon was forgotten passes
# for a configuration. Here: what is at the top level is checked before OmegaConf reads it.
#
# Seen on 2026-11-28:
#   {'model': None}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet omegaconf==2.4.0
echo model > "$folder/one_word.yaml"
output=$("$folder/venv/bin/python" -c '
import sys

from omegaconf import OmegaConf

print(OmegaConf.load(sys.argv[1]))' "$folder/one_word.yaml")
echo "$output"
[ "$output" = "{'model': None}" ]
