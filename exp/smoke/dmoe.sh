#!/usr/bin/env bash
# The complete job on any machine: a dMoE GPT learns the text of Python's standard library, from raw text to plots.
# Without a GPU it runs two CPU processes, each with half of the experts; with a GPU it runs one process in bf16.
# Usage: dmoe.sh [EXP_DIR [STEPS]]     (default: a new folder under runs/; environment: exp/common.sh)
# 80 evaluations of 8 sequences cover the whole validation text, so the loss is comparable to its unigram entropy.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
STEPS=${2:-${STEPS:-160}}
if [ "$(gpus)" -gt 0 ]; then NGPU=${NGPU:-1} DTYPE=(--bf16); else NGPU=${NGPU:-2} DTYPE=(); fi

default_data
launch "${1:-$ROOT/runs/smoke_dmoe_$(date +%Y%m%d_%H%M%S)}" \
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 \
    --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope \
    --moe-num-experts 8 --moe-top-k 2 --moe-loss-weight 0.1 --moe-expert-model-parallelism \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$STEPS" --lr-decay-iters "$STEPS" \
    --optimizer adam --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --clip-grad 1.0 \
    --weight-decay 0.01 --init-method-std 0.02 "${DTYPE[@]}" \
    --log-interval 10 --eval-interval 60 --eval-iters 80 --save-interval 100
