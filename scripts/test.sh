#!/usr/bin/env bash
# test.sh PYTHON FLOOR [PYTEST_ARGS...]: all tests but the integration ones, as two lanes side by side (the tests that start
# processes mostly wait), and the line coverage of what ran under it. The model checker and the random jobs run without:
# coverage would double their time and add next to no line. The floor holds for whole runs, without arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1" floor="$2"
shift 2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # worker processes must not fight for the cores
scratch="$(mktemp -d)"
background=""
trap '[ -z "$background" ] || kill "$background" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# run LANE COVERED FOLDER... -- PYTEST_ARGS...: one pytest run over those of the folders that exist.
run() {
    local lane="$1" covered="$2" folders=() options=()
    shift 2
    while [ "$1" != "--" ]; do [ ! -d "tests/$1" ] || folders+=("tests/$1"); shift; done
    shift
    [ "${#folders[@]}" -gt 0 ] || return 0
    [ "$covered" = no ] || options=(--cov --cov-report=)
    local status=0
    COVERAGE_FILE="$scratch/data-$lane" "$python" -m pytest "${folders[@]}" -o cache_dir=".pytest_cache/$lane" \
        "${options[@]}" "$@" || status=$?
    # 5: no test was selected, which is no failure where arguments select.
    [ "$status" -eq 5 ] && [ $# -gt 0 ] || return "$status"
}

# Two lanes side by side, about as long as each other. Conformance has a process of its own: it counts what it leaves behind.
beside() {
    local status=0
    run processes yes multiprocess -- "$@" || status=$?
    run quick yes unit gpu repository -- "$@" || status=$?
    return "$status"
}
beside "$@" >"$scratch/output" 2>&1 &
background=$!
inside=0 random=0 transports=0 processes=0
run inside yes planning -- "$@" || inside=$?
run random no properties faults -- "$@" || random=$?
run transports yes conformance -- "$@" || transports=$?
echo "--- the tests that start processes, and the unit tests, ran meanwhile:"
wait "$background" || processes=$?
background=""
cat "$scratch/output"
if [ $((inside + random + transports + processes)) -ne 0 ]; then exit 1; fi

if [ $# -gt 0 ]; then floor=0; fi
export COVERAGE_FILE="$scratch/both"
"$python" -m coverage combine --quiet "$scratch"/data-*
"$python" -m coverage report --skip-covered --fail-under="$floor"
