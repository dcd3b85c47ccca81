#!/usr/bin/env bash
# Makes $TRANSPORTS_VENV (default .venvs/transports): NIXL and Mooncake's transfer engine in an environment of their own, with
# what their conformance tests need and no torch (NIXL asks for it and does without). The package itself is run from src, with
# the kernels that .venv has built there. Some 0.5 GB and half a minute. Safe to run again. Used by `make test-transports`.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV="${TRANSPORTS_VENV:-.venvs/transports}"
CONSTRAINTS=requirements/constraints.txt
LIBRARIES=(libibverbs1 libnl-3-200 libnl-route-3-200) # Mooncake loads them, with RDMA cards or without

say() { echo "setup: $*" >&2; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install -qq "$@" >&2; }

"$PYTHON" -c 'import platform; platform.machine() == "x86_64" or exit(1)' || { say "tested on x86_64 only"; exit 1; }
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
fi
say "installing NIXL and Mooncake"
pip -c "$CONSTRAINTS" cffi hypothesis msgspec numpy pytest pytest-timeout
grep -E '^(nixl-cu12|mooncake-transfer-engine-non-cuda)==' "$CONSTRAINTS" >"$VENV/transports.txt"
pip --no-deps -r "$VENV/transports.txt"

works() { "$VENV/bin/python" -c 'import mooncake.engine, nixl_cu12._api'; }
if ! works >/dev/null 2>&1; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian packages: ${LIBRARIES[*]}"
        apt-get update -q >&2 </dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${LIBRARIES[@]}" >&2 </dev/null
    else
        say "on Debian: apt-get install ${LIBRARIES[*]}   (as root), then try again"
    fi
    works
fi
say "done"
