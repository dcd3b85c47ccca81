#!/usr/bin/env bash
# bench.sh PYTHON [NAME]: runs benchmarks/NAME.py or benchmarks/NAME/, or all files one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
shift
if [ $# -gt 0 ]; then
    name="$1"
    shift
    if [ ! -f "benchmarks/$name.py" ] && [ ! -f "benchmarks/$name/__main__.py" ]; then
        echo "no benchmark $name; there are: $(cd benchmarks 2>/dev/null && ls ./[!_]*.py ./*/__main__.py | sed 's,^\./,,; s,/__main__\.py$,,; s,\.py$,,' | tr '\n' ' ')" >&2
        exit 2
    fi
    exec "$python" -m "benchmarks.$name" "$@"
fi
for file in benchmarks/[!_]*.py; do
    echo "== $file"
    "$python" -m "benchmarks.$(basename "$file" .py)"
done
