#!/usr/bin/env bash
# dMoE-Large: every feed-forward layer of the 760M GPT is a dropless MoE. 8 GPUs, 8-way expert parallel.
# Usage: dmoe_760m_8gpu.sh EXP_DIR [STEPS [NUM_EXPERTS [TOP_K [LOSS_WEIGHT [BATCH]]]]]     (environment: exp/common.sh)
# The published script uses Adafactor in fp16 for this size. Megatron has no Adafactor, so this one uses Adam in bf16.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-20000}} NUM_EXPERTS=${3:-64} TOP_K=${4:-1} LOSS_WEIGHT=${5:-0.1} BATCH=${6:-8} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 24 --hidden-size 1536 --num-attention-heads 16 \
    --moe-num-experts "$NUM_EXPERTS" --moe-top-k "$TOP_K" --moe-loss-weight "$LOSS_WEIGHT" \
    --moe-expert-model-parallelism \
    --micro-batch-size "$BATCH" --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 4e-4 --min-lr 4e-5 --init-method-std 0.01 --bf16
