#!/usr/bin/env bash
# Make a virtual environment that runs a real SGLang server on a CPU.
#
# Usage: install.sh VENV        (PYTHON=... chooses the interpreter, 3.11 or 3.12; default python3)
#
# A finished environment carries a stamp with the digest of this recipe: a second call returns at
# once, a changed recipe or an interrupted call builds the environment anew.
set -euo pipefail

main() {
    local venv=${1:?usage: install.sh VENV}
    local recipe digest
    recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    digest=$(digest_of_recipe "$recipe")

    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock 9 # a second caller waits here and then finds the stamp

    if is_finished "$venv" "$digest"; then
        echo "$venv is up to date"
        return
    fi
    make_empty_environment "$venv" "${PYTHON:-python3}"
    install_pinned_packages "$venv" "$recipe"
    install_cpu_support "$venv" "$recipe"
    check_that_the_server_imports "$venv"
    write_stamp "$venv" "$digest"
    echo "$venv is ready"
}

digest_of_recipe() { # RECIPE
    (
        cd "$1"
        {
            echo install.sh
            echo patch_torchvision.py
            echo requirements.txt
            find cpu_support -type f \( -name '*.py' -o -name '*.toml' \)
        } | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1
    )
}

is_finished() { # VENV DIGEST
    [[ -f $1/.posttrain-sglang-cpu && $(<"$1/.posttrain-sglang-cpu") == "$2" ]]
}

make_empty_environment() { # VENV PYTHON
    if [[ -e $1 && ! -f $1/pyvenv.cfg && -n $(ls -A "$1") ]]; then
        echo "install.sh: $1 exists and is no virtual environment; name another folder" >&2
        exit 1
    fi
    if ! "$2" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'; then
        echo "install.sh: $2 is $("$2" --version 2>&1); set PYTHON to Python 3.11 or 3.12" >&2
        exit 1
    fi
    "$2" -m venv --clear "$1"
}

install_pinned_packages() { # VENV RECIPE
    # No dependency resolution: SGLang asks for a CUDA stack and another torch; the pins are the
    # whole set that a CPU server imports.
    pip_of "$1" install --no-deps --requirement "$2/requirements.txt"
    # A CUDA build of torch (all that PyPI has) cannot be imported without its libraries; a CPU
    # build needs nothing more and this line does nothing.
    pip_of "$1" install --constraint "$2/requirements.txt" "$(grep -o '^torch==[^ ]*' "$2/requirements.txt")"
}

install_cpu_support() { # VENV RECIPE
    local source=$1/posttrain-cpu-support # a copy: building leaves files beside the sources
    "$1/bin/python" "$2/patch_torchvision.py"
    cp -R "$2/cpu_support" "$source"
    pip_of "$1" install --no-deps --no-index --no-build-isolation "$source"
    rm -r "$source"
}

check_that_the_server_imports() { # VENV
    SGLANG_USE_CPU_ENGINE=1 "$1/bin/python" -W ignore -c \
        'import posttrain_sglang_cpu, sgl_kernel, sglang.launch_server, sglang.srt.managers.scheduler'
}

write_stamp() { # VENV DIGEST
    echo "$2" >"$1/.posttrain-sglang-cpu.part"
    sync "$1/.posttrain-sglang-cpu.part"
    mv "$1/.posttrain-sglang-cpu.part" "$1/.posttrain-sglang-cpu"
}

pip_of() { # VENV ARGUMENTS...
    "$1/bin/python" -m pip --quiet --disable-pip-version-check --no-input "${@:2}"
}

main "$@"
