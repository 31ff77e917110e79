#!/usr/bin/env bash
# Transformer-Small: the dense GPT with 125M parameters, the baseline of the MoEs. 8 GPUs.
# Usage: gpt2_125m_8gpu.sh EXP_DIR [STEPS]     (environment: exp/common.sh)
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-100000}} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
    --micro-batch-size 64 --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 6e-4 --min-lr 6e-5 --init-method-std 0.01 --bf16
