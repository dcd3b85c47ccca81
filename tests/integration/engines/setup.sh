#!/usr/bin/env bash
# setup.sh NAME: makes .venvs/NAME with an engine (megatron, sglang) from nothing, or brings it up to date.
# requirements-NAME.txt is installed with what it brings, requirements-NAME-bare.txt without.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../../.."
name="$1"
venv=".venvs/$name"
PYTHON="${PYTHON:-python3}"

# An interrupted set-up is not repaired: it starts over.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -qq "$@" >&2; }

echo "setup: installing $name into $venv (minutes, the first time)" >&2
# torch first: the build of it that this machine's pip configuration prefers, before anything else asks for one.
pip "$(grep -E '^torch==' "$here/requirements-$name.txt")"
pip -r "$here/requirements-$name.txt"
pip --no-deps --ignore-requires-python -r "$here/requirements-$name-bare.txt"
touch "$venv/.installed"
echo "setup: done" >&2
