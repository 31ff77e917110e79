#!/usr/bin/env bash
# The paper's comparison by one command: dense, dropless, dropping and padding models on the same tokens.
# Usage: compare.sh OUT [MODEL]     (MODEL: xs, small or toy; docs/comparing_methods.md explains the settings)
# Environment: NGPU, DATA_PREFIX, FLAGS, PYTHON, DRY_RUN of exp/common.sh, and
#   BUDGET       tokens of each run (100M, 10B) or minutes of the whole comparison (default 10min)
#   ARMS         arms and groups of them, separated by commas (default paper,tutel; all)
#   SEEDS        seeds of each arm (default 1)
#   RATES        learning rate of all arms (default 6e-4), published, or tuned
#   BATCH        sequences a step (default by budget: 128 to 512)
#   MICRO_BATCH  micro-batch of all arms, or less where it does not fit (default: for each arm the largest that fits)
#   SAVE_EVERY   tokens between checkpoints (default 500M; 0: never)
# Ctrl-C stops; the same command goes on. Writes OUT/record.json, pictures and OUT/RESULTS.md.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
count=$(gpus)
export NGPU=${NGPU:-$((count > 0 ? count : 1))} DATA_PREFIX
if [ "${DRY_RUN:-0}" = 1 ]; then
    PYTHON=${PYTHON:-python3}
else
    find_python
    STEPS=1 default_data
fi
exec "$PYTHON" "$ROOT/scripts/paper.py" "$@"
