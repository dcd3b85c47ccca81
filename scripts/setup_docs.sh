#!/usr/bin/env bash
# Makes $DOCS_VENV (default .venvs/docs): what builds the site, in an environment of its own, without this package: its sources
# are read, not imported. Some 100 MB and half a minute. Safe to run again. Used by `make docs`.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV="${DOCS_VENV:-.venvs/docs}"

say() { echo "setup: $*" >&2; }

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
fi
say "installing MkDocs and its plugins"
"$VENV/bin/python" -m pip --disable-pip-version-check install -qq -r requirements/docs.txt >&2
say "done"
