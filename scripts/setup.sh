#!/usr/bin/env bash
# Makes $VENV from nothing, or brings it up to date: the Makefile's only set-up step, safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
CONSTRAINTS=requirements/constraints.txt

say() { echo "setup: $*" >&2; }

# need COMMAND... -- PACKAGE...: runs COMMAND; where it fails installs the Debian packages when root, else names them.
need() {
    local check=() packages=()
    while [ "$1" != "--" ]; do check+=("$1"); shift; done
    shift
    packages=("$@")
    if "${check[@]}" >/dev/null 2>&1; then return; fi
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian packages: ${packages[*]}"
        apt-get update -q >&2 </dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" >&2 </dev/null
        if "${check[@]}" >/dev/null 2>&1; then return; fi
    fi
    say "'${check[*]}' fails here. On Debian: apt-get install ${packages[*]}   (as root), then try again."
    exit 1
}

has_headers() {
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

need "$PYTHON" -c 'import sys; assert sys.version_info >= (3, 10)' -- python3
need "$PYTHON" -c 'import ensurepip, venv' -- python3-venv
need cc --version -- gcc libc6-dev
need has_headers -- python3-dev

# A virtual environment that was copied or half made does not run: start over.
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install -qq -c "$CONSTRAINTS" "$@" >&2; }

# torch first and by its exact version: whichever build of it the machine's pip configuration prefers (a CPU build, say)
# is then in place before anything else asks for "torch", which could bring gigabytes of CUDA libraries.
say "installing torch (minutes, the first time)"
pip "$(grep -E '^torch==' "$CONSTRAINTS")"
say "installing the build tools"
pip setuptools wheel cffi
say "installing weightbridge-rl with what its tests and its demo need"
pip --no-build-isolation -e '.[dev,demo]'
say "done"
