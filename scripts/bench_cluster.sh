#!/usr/bin/env bash
# bench_cluster.sh PYTHON [SCENARIO...]: measures scenarios of the emulated cluster (all of them: about an hour), one after the
# other, and puts the tables and plots of all that have been measured into docs/benchmarks.md and docs/benchmarks/. Needs root.
# Documents are kept in build/benchmarks/cluster; REPEATS sets the number of measured updates.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
shift
ALL=(replicas a b tdp-rdp slow-node tiny-tensors huge-tensor small-budget)
KEPT=build/benchmarks/cluster
mkdir -p "$KEPT"
for scenario in "${@:-${ALL[@]}}"; do
    plots=()
    if [ "$scenario" = replicas ]; then plots=(--plots docs/benchmarks); fi
    echo "== $scenario" >&2
    "$python" -m benchmarks.cluster "$scenario" --json --repeats "${REPEATS:-5}" "${plots[@]}" >"$KEPT/$scenario.part"
    mv "$KEPT/$scenario.part" "$KEPT/$scenario.json"
done
found=()
for scenario in "${ALL[@]}"; do
    if [ -f "$KEPT/$scenario.json" ]; then found+=("$KEPT/$scenario.json"); fi
done
"$python" -m benchmarks.cluster.markdown "${found[@]}" --write docs/benchmarks.md
echo "docs/benchmarks.md has the tables of: ${found[*]}" >&2
