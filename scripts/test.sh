#!/usr/bin/env bash
# test.sh PYTHON FLOOR [PYTEST_ARGS...]: all tests but the integration ones, as two pytest runs side by side (the tests that
# start processes mostly wait), and the line coverage of both together. The floor holds for whole runs, without arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1" floor="$2"
shift 2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # worker processes must not fight for the cores
scratch="$(mktemp -d)"
background=""
trap '[ -z "$background" ] || kill "$background" 2>/dev/null || true; rm -rf "$scratch"' EXIT

inside=() processes=()
for folder in unit repository properties conformance faults gpu; do [ ! -d "tests/$folder" ] || inside+=("tests/$folder"); done
for folder in multiprocess; do [ ! -d "tests/$folder" ] || processes+=("tests/$folder"); done

options=(--cov --cov-report= "$@")
if [ "${#processes[@]}" -gt 0 ]; then
    COVERAGE_FILE="$scratch/processes" "$python" -m pytest "${processes[@]}" -o cache_dir=.pytest_cache/processes \
        "${options[@]}" >"$scratch/output" 2>&1 &
    background=$!
fi
inside_status=0 processes_status=0
COVERAGE_FILE="$scratch/inside" "$python" -m pytest "${inside[@]}" -o cache_dir=.pytest_cache/inside \
    "${options[@]}" || inside_status=$?
if [ -n "$background" ]; then
    echo "--- the tests that start processes ran meanwhile:"
    wait "$background" || processes_status=$?
    background=""
    cat "$scratch/output"
fi
for status in "$inside_status" "$processes_status"; do
    # 5: no test was selected, which is no failure where arguments select.
    if [ "$status" -ne 0 ] && ! { [ "$status" -eq 5 ] && [ $# -gt 0 ]; }; then exit 1; fi
done

data=()
for name in inside processes; do [ ! -f "$scratch/$name" ] || data+=("$scratch/$name"); done
export COVERAGE_FILE="$scratch/both"
if [ $# -gt 0 ]; then floor=0; fi
"$python" -m coverage combine --quiet "${data[@]}"
"$python" -m coverage report --skip-covered --fail-under="$floor"
