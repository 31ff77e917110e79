#!/usr/bin/env bash
# Transformer-Large: the dense GPT with 760M parameters, the baseline of the MoEs. 8 GPUs.
# Usage: gpt2_760m_8gpu.sh EXP_DIR [STEPS]     (environment: exp/common.sh)
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-100000}} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 24 --hidden-size 1536 --num-attention-heads 16 \
    --micro-batch-size 32 --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 4e-4 --min-lr 4e-5 --init-method-std 0.01 --bf16
