#!/usr/bin/env bash
# Transformer-Small: the dense GPT with 125M parameters, the baseline of the MoEs. 1 GPU.
# Usage: gpt2_125m_1gpu.sh EXP_DIR [STEPS]     (environment: exp/common.sh)
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-100000}} NGPU=${NGPU:-1}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
    --micro-batch-size 32 --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 1.5e-4 --min-lr 1e-5 --init-method-std 0.01 --fp16
