#!/usr/bin/env bash
# Run all tests that need a GPU on a machine with one, in under five minutes, and say what cannot be shown there.
# Usage: tests/gpu/run.sh [more arguments of pytest]. PYTHON names another interpreter than .venv/bin/python.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
limit_s=280

if ! "$python" -c "import pytest, torch" 2> /dev/null; then
  echo "run.sh: $python has no pytest and torch; run 'make lint' once or set PYTHON" >&2
  exit 2
fi

# The whole time is limited, each test as well: what hangs on a device cannot always be ended from inside.
timeout --kill-after=10 "$limit_s" "$python" -m pytest tests/gpu -m gpu -rs --timeout=120 -p no:cacheprovider "$@"
code=$?
if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
  echo "run.sh: not done after $limit_s s" >&2
fi

cat << 'TEXT'

Not shown on one GPU, since NCCL refuses two ranks on one device:
  - an AllReduce between two GPUs, its bandwidth, and the abort of one whose peer is lost in the middle;
  - a spare that waits on a GPU of its own and takes over with NCCL;
  - NVLink domains, NUMA nodes and the choice of GPUs that lie near together.
MIG slices and MPS are shown only where the administrator has turned them on; these tests do not.
TEXT
exit "$code"
