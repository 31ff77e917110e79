#!/usr/bin/env bash
# The tests, and the checks beside them. Usage: scripts/test.sh [--all] [pytest arguments]
#   --all      also runs the slow tests
#   DRY_RUN=1  only prints the commands
#   WORKERS=N  pytest workers (default 2; for the tests that need a GPU half of the cores, at most 16)
set -euo pipefail
cd "$(dirname "$0")/.."

workers=${WORKERS:-2}
args=(--dist loadgroup -r fE)
if [ "${1:-}" = "--all" ]; then
    shift
    args+=(-m "slow or not slow")
fi
args+=("$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf 'bash scripts/check.sh\npython -m pytest -n %s' "$workers"
    printf ' %q' "${args[@]}"
    echo
    exit 0
fi

source scripts/env.sh
use_env megatron dev docs
export PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    # Tests start some hundred processes, and each would compile torch (2 s) and Megatron (8 s) again.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$PWD/build/bytecode}"
fi
log=$(mktemp)
bash scripts/check.sh >"$log" 2>&1 & # beside the tests, which leave cores idle
checking=$!
trap 'kill "$checking" 2>/dev/null || true; rm -f "$log"' EXIT # a command that fails here would set the exit status
status=0
if nvidia-smi -L >/dev/null 2>&1 && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ]; then
    echo "test: first the CPU path, then the tests for the GPU"
    CUDA_VISIBLE_DEVICES="" "$PYTHON" -m pytest -n "$workers" "${args[@]}" || status=$?
    half=$(($(nproc) / 2))
    workers=${WORKERS:-$((half < 2 ? 2 : half > 16 ? 16 : half))}
    args+=(-m "gpu or any_device")
fi
"$PYTHON" -m pytest -n "$workers" "${args[@]}" || status=$?
wait "$checking" || status=1
cat "$log"
exit "$status"
