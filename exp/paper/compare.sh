#!/usr/bin/env bash
# The paper's comparison in one command: dense, dropless, dropping and padding models on the same tokens.
# Usage: compare.sh OUT [MODEL]     (MODEL: xs, small or toy; docs/comparing_methods.md explains the settings)
# Environment: NGPU, DATA_PREFIX, FLAGS, PYTHON, DRY_RUN of exp/common.sh, and
#   BUDGET       tokens of each run (100M, 10B) or minutes of the whole comparison (default 10min)
#   ARMS         arms and groups of them, separated by commas (default paper,tutel; all)
#   SEEDS        number of seeds of each arm, and of single arms (3,tutel-1:1; default 1)
#   RATES        learning rate of all arms (default 6e-4), published, or tuned
#   BATCH        sequences per step (default by budget: 128 to 512)
#   MICRO_BATCH  micro-batch of all arms and of single arms (128,tutel-0:16), or less if it does not fit (default: for
#                each arm the largest that fits)
#   AT_ONCE      parallel runs, each on NGPU GPUs of its own (default 1)
#   SAVE_EVERY   tokens between checkpoints (default 500M; 0: never)
#   UNFINISHED   for unfinished runs: resume (default), or record: report them up to where they stopped, run nothing
# Ctrl-C stops; the same command continues. Writes OUT/record.json, pictures and OUT/RESULTS.md.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
export AT_ONCE=${AT_ONCE:-1} DATA_PREFIX
_check_whole AT_ONCE 1 1024
devices=()
if [ "$(gpus)" -gt 0 ]; then
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-$(seq -s , 0 $(($(gpus) - 1)))}
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
fi
count=${#devices[@]}
export NGPU=${NGPU:-$((count > AT_ONCE ? count / AT_ONCE : 1))}
if is_dry_run; then
    PYTHON=${PYTHON:-python3}
else
    find_python
    [ "${UNFINISHED:-}" = record ] || STEPS=1 default_data
fi
exec "$PYTHON" "$ROOT/benchmarks/paper_run.py" "$@"
