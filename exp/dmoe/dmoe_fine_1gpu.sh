#!/usr/bin/env bash
# A fine-grained GPT of today: SwiGLU, RMSNorm, rotary embeddings, no dropout; 128 experts of width 256, 8 for each token.
# 1.9B parameters, 0.2B of them active. 1 GPU. It is not a published run. Use data with a vocabulary of 51,200
# (scripts/prepare_data.py --vocab-size 51200).
# Usage: dmoe_fine_1gpu.sh EXP_DIR [STEPS [NUM_EXPERTS [TOP_K [LOSS_WEIGHT [BATCH]]]]]     (environment: exp/common.sh)
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-20000}} NUM_EXPERTS=${3:-128} TOP_K=${4:-8} LOSS_WEIGHT=${5:-0.1} BATCH=${6:-8} NGPU=${NGPU:-1}

launch "${1:?EXP_DIR, the folder of this run, is missing}" "${PUBLISHED[@]}" \
    --num-layers 24 --hidden-size 768 --num-attention-heads 12 --seq-length 4096 --max-position-embeddings 4096 \
    --global-batch-size 128 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 \
    --moe-num-experts "$NUM_EXPERTS" --moe-top-k "$TOP_K" --moe-loss-weight "$LOSS_WEIGHT" \
    --moe-ffn-hidden-size 256 --moe-expert-model-parallelism \
    --micro-batch-size "$BATCH" --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --lr 6e-4 --min-lr 6e-5 --init-method-std 0.01 --bf16
