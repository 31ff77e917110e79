#!/usr/bin/env bash
# MoE-XS with a capacity factor: tokens beyond the capacity of an expert are dropped. 0 or a huge factor drops none.
# Usage: moe_46m_8gpu.sh EXP_DIR [STEPS [NUM_EXPERTS [CAPACITY_FACTOR [TOP_K [LOSS_WEIGHT [BATCH]]]]]]
# Environment: exp/common.sh.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-20000}} NUM_EXPERTS=${3:-64} CAPACITY_FACTOR=${4:-16384} TOP_K=${5:-1}
LOSS_WEIGHT=${6:-0.1} BATCH=${7:-64} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 6 --hidden-size 512 --num-attention-heads 8 \
    --moe-num-experts "$NUM_EXPERTS" --moe-top-k "$TOP_K" --moe-loss-weight "$LOSS_WEIGHT" \
    --moe-capacity-factor "$CAPACITY_FACTOR" --moe-expert-model-parallelism \
    --micro-batch-size "$BATCH" --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 1.5e-4 --min-lr 1e-5 --init-method-std 0.01 --fp16
