#!/usr/bin/env bash
# MoE-XS with Tutel's layer, or with our layer under Tutel's capacity rule if Tutel is not installed (the log says
# which). CAPACITY_FACTOR: above 0 as usual; 0 means the load of the fullest expert (drops no token); below 0 means the
# smaller of both.
# Usage: tutel_46m_8gpu.sh EXP_DIR [STEPS [NUM_EXPERTS [CAPACITY_FACTOR [TOP_K [LOSS_WEIGHT [BATCH]]]]]]
# Environment: exp/common.sh.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-20000}} NUM_EXPERTS=${3:-64} CAPACITY_FACTOR=${4:-0} TOP_K=${5:-1}
LOSS_WEIGHT=${6:-0.1} BATCH=${7:-32} NGPU=${NGPU:-8}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 6 --hidden-size 512 --num-attention-heads 8 \
    --moe-num-experts "$NUM_EXPERTS" --moe-top-k "$TOP_K" --moe-loss-weight "$LOSS_WEIGHT" \
    --megablocks-layer tutel --megablocks-capacity-rule tutel --moe-capacity-factor "$CAPACITY_FACTOR" --moe-expert-model-parallelism \
    --micro-batch-size "$BATCH" --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 6e-4 --min-lr 6e-5 --init-method-std 0.01 --bf16
