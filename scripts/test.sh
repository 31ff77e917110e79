#!/usr/bin/env bash
# The tests, and the checks at the same time. Usage: scripts/test.sh [--all] [--gpu] [pytest arguments]
#   --all      also runs the slow tests
#   --gpu      only the tests that use a GPU, including the slow ones; no checks
#   DRY_RUN=1  only prints the commands
#   WORKERS=N  pytest workers (default 2; with --gpu half of the cores, at most 16)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

has_gpu() { nvidia-smi -L >/dev/null 2>&1 && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ]; }
half=$(($(nproc --all) / 2))
gpu_workers=${WORKERS:-$((half < 2 ? 2 : half > 16 ? 16 : half))}
on_gpu=(-m "gpu or any_device")

workers=${WORKERS:-2}
which=() others=() only_gpu=""
for argument; do
    case $argument in
    --all) which=(-m "slow or not slow") ;;
    --gpu) only_gpu=1 ;;
    *) others+=("$argument") ;;
    esac
done
[ -z "$only_gpu" ] || which=("${on_gpu[@]}") workers=$gpu_workers
args=(--dist loadgroup -r fE "${which[@]}" "${others[@]}")
if is_dry_run; then
    [ -n "$only_gpu" ] || echo "bash scripts/check.sh"
    printf 'python -m pytest -n %s' "$workers"
    printf ' %q' "${args[@]}"
    echo
    exit 0
fi
[ -z "$only_gpu" ] || has_gpu || {
    echo "test: --gpu: nvidia-smi finds no GPU here, or CUDA_VISIBLE_DEVICES hides it; leave --gpu out" >&2
    exit 1
}

use_env megatron dev docs
export PYTHON OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    # Tests start some hundred processes, and each would compile torch (2 s) and Megatron (8 s) again.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$PWD/build/bytecode}"
fi
[ -z "$only_gpu" ] || exec "$PYTHON" -m pytest -n "$workers" "${args[@]}"
log=$(mktemp)
bash scripts/check.sh >"$log" 2>&1 & # during the tests, which leave cores idle
checking=$!
trap 'kill "$checking" 2>/dev/null || true; rm -f "$log"' EXIT # a command that fails here would set the exit status
status=0
if has_gpu; then
    echo "test: first the CPU path, then the tests for the GPU"
    CUDA_VISIBLE_DEVICES="" "$PYTHON" -m pytest -n "$workers" "${args[@]}" || status=$?
    workers=$gpu_workers
    args+=("${on_gpu[@]}")
fi
"$PYTHON" -m pytest -n "$workers" "${args[@]}" || status=$?
wait "$checking" || status=1
cat "$log"
exit "$status"
