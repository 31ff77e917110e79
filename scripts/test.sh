#!/usr/bin/env bash
# The checks, then the tests. Usage: scripts/test.sh [--all] [pytest arguments]
#   --all      also runs the slow tests
#   DRY_RUN=1  only prints the commands
#   WORKERS=N  pytest workers (default 2)
set -euo pipefail
cd "$(dirname "$0")/.."

args=(-n "${WORKERS:-2}" --dist loadgroup -r fE)
if [ "${1:-}" = "--all" ]; then
    shift
    args+=(-m "slow or not slow")
fi
args+=("$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf 'bash scripts/check.sh\npython -m pytest'
    printf ' %q' "${args[@]}"
    echo
    exit 0
fi

source scripts/env.sh
use_env megatron dev docs
export PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0 last=""
bash scripts/check.sh || { status=1 last="test: scripts/check.sh failed; its output stands before that of the tests"; }
if nvidia-smi -L >/dev/null 2>&1 && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ]; then
    echo "test: first the CPU path, then the tests for the GPU"
    CUDA_VISIBLE_DEVICES="" "$PYTHON" -m pytest "${args[@]}" || status=$?
    args+=(-m "gpu or any_device")
fi
"$PYTHON" -m pytest "${args[@]}" || status=$?
[ -z "$last" ] || echo "$last"
exit "$status"
