#!/usr/bin/env bash
# dMoE-Medium: every feed-forward layer of the 356M GPT is a dropless MoE. 8 GPUs, 8-way expert parallel.
# Usage: dmoe_356m_8gpu.sh EXP_DIR [STEPS [NUM_EXPERTS [TOP_K [LOSS_WEIGHT [BATCH]]]]]     (environment: exp/common.sh)
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-20000}} NUM_EXPERTS=${3:-64} TOP_K=${4:-1} LOSS_WEIGHT=${5:-0.1} BATCH=${6:-16} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --moe-num-experts "$NUM_EXPERTS" --moe-top-k "$TOP_K" --moe-loss-weight "$LOSS_WEIGHT" \
    --moe-expert-model-parallelism \
    --micro-batch-size "$BATCH" --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 6e-4 --min-lr 6e-5 --init-method-std 0.01 --bf16
