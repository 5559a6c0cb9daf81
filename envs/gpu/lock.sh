#!/usr/bin/env bash
# Resolve the image's pins against the package index, for the image's Python and C library: envs/gpu/lock.sh
# It needs uv (https://docs.astral.sh/uv/) and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."

lock() { # output, then what is resolved
    local output=$1
    shift
    uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
        --output-file "$output" "$@"
}

# The trainer's packages are those that are tested on CPUs; only torch is another.
lock envs/gpu/trainer.txt envs/gpu/trainer.in pyproject.toml --extra broadcast --extra formats \
    --constraint <(grep -vE '^(torch|triton)==' envs/cpu/constraints.txt)
lock envs/gpu/engine.txt envs/gpu/engine.in
