#!/usr/bin/env bash
# test.sh PYTHON FLOOR [PYTEST_ARGS...]: all tests but the integration ones, as three lanes side by side, and the line coverage
# of what ran under it. Two lanes compute; the third starts processes and mostly waits. The model checker and the random jobs
# run without coverage: it would double their time and add next to no line. The floor holds for whole runs, without arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1" floor="$2"
shift 2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # worker processes must not fight for the cores
scratch="$(mktemp -d)"
beside=()
trap '[ "${#beside[@]}" -eq 0 ] || kill "${beside[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# run NAME COVERED NICE FOLDER... -- PYTEST_ARGS...: one pytest run over those of the folders that exist.
run() {
    local name="$1" covered="$2" nice="$3" folders=() options=()
    shift 3
    while [ "$1" != "--" ]; do [ ! -d "tests/$1" ] || folders+=("tests/$1"); shift; done
    shift
    [ "${#folders[@]}" -gt 0 ] || return 0
    [ "$covered" = no ] || options=(--cov --cov-report=)
    local status=0
    COVERAGE_FILE="$scratch/data-$name" nice -n "$nice" "$python" -m pytest "${folders[@]}" \
        -o cache_dir=".pytest_cache/$name" "${options[@]}" "$@" || status=$?
    # 5: no test was selected, which is no failure where arguments select.
    [ "$status" -eq 5 ] && [ $# -gt 0 ] || return "$status"
}

# The lanes take about as long as each other. Who computes yields to who has waited for a word and now has something to do.
# Conformance has a process of its own: it counts what it leaves behind.
quick() {
    local status=0
    run faults no 3 faults -- "$@" || status=$?
    run quick yes 3 planning unit gpu repository -- "$@" || status=$?
    return "$status"
}
run processes yes 0 multiprocess -- "$@" >"$scratch/processes" 2>&1 &
beside+=($!)
quick "$@" >"$scratch/quick" 2>&1 &
beside+=($!)
failed=0
run random no 3 properties -- "$@" || failed=1
run transports yes 0 conformance -- "$@" || failed=1
for lane in quick processes; do # the last first
    wait "${beside[-1]}" || failed=1
    unset "beside[-1]"
    echo "--- the lane '$lane' ran meanwhile:"
    cat "$scratch/$lane"
done
[ "$failed" -eq 0 ] || exit 1

if [ $# -gt 0 ]; then floor=0; fi
export COVERAGE_FILE="$scratch/both"
"$python" -m coverage combine --quiet "$scratch"/data-*
"$python" -m coverage report --skip-covered --fail-under="$floor"
