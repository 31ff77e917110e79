#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, unmodified, trains a small dMoE GPT: its --spec flag names our layers.
# Usage: dmoe_spec.sh [EXP_DIR [STEPS]]     (environment: NGPU, STEPS, DATA_PREFIX, FLAGS, PYTHON, DRY_RUN of exp/common.sh)
#   MEGATRON_LM_PATH   a checkout without its megatron/ folder (default: third_party/Megatron-LM, fetched if it is missing)
#   MEGABLOCKS_*       instead of our driver's flags, which this script lacks: MEGABLOCKS_CAPACITY_FACTOR=1.25
# The data set must have a SentencePiece tokenizer, which scripts/prepare_data.py makes by default.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
EXP_DIR=$(realpath -m -- "${1:-$ROOT/runs/spec_dmoe_$(date +%Y%m%d_%H%M%S)}")
STEPS=${2:-${STEPS:-100}}
MEGATRON_LM=${MEGATRON_LM_PATH:-$ROOT/third_party/Megatron-LM}
if [ "$(gpus)" -gt 0 ]; then
    NGPU=${NGPU:-1} MACHINE=(--bf16)
else
    NGPU=${NGPU:-2} MACHINE=(--distributed-backend gloo --use-cpu-initialization)
fi
read -d '' -ra flags <<<"${FLAGS:-}" || true # FLAGS can have several lines
_check_settings
[ ! -e "$EXP_DIR" ] || [ -d "$EXP_DIR" ] || die "EXP_DIR=$EXP_DIR is a file: choose another folder"

model=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512
    --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope --disable-bias-linear
    --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size "$NGPU"
    --spec megablocks.megatron.specs block_spec)
# Megatron's defaults for these need Transformer Engine or apex.
without_engine=(--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion)
# Without --data-cache-path Megatron writes its index files into the data set's folder.
data=(--train-data-path "$DATA_PREFIX/train" --valid-data-path "$DATA_PREFIX/valid" --data-cache-path "$EXP_DIR/data_cache"
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA_PREFIX/tokenizer.model")
# Megatron divides by --eval-interval, for which it has no default.
training=(--micro-batch-size 4 --global-batch-size 8 --train-iters "$STEPS" --lr-decay-iters "$STEPS" --optimizer adam
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --clip-grad 1.0 --weight-decay 0.01
    --log-interval 10 --eval-interval 1000 --eval-iters 10 --num-workers 0)
run=(-m torch.distributed.run --standalone --nproc-per-node "$NGPU" "$MEGATRON_LM/pretrain_gpt.py"
    "${model[@]}" "${without_engine[@]}" "${MACHINE[@]}" "${data[@]}" "${training[@]}" "${flags[@]}")
if is_dry_run; then
    printf '%q ' "${PYTHON:-python3}" "${run[@]}"
    echo
    exit 0
fi

find_python
[ -n "${MEGATRON_LM_PATH:-}" ] || bash "$ROOT/third_party/fetch.sh" Megatron-LM ||
    die "third_party/Megatron-LM is missing or was edited: see the line above, or set MEGATRON_LM_PATH to a checkout"
[ -f "$MEGATRON_LM/pretrain_gpt.py" ] || die "MEGATRON_LM_PATH=$MEGATRON_LM holds no pretrain_gpt.py: set it to a checkout"
[ ! -e "$MEGATRON_LM/megatron" ] || die "$MEGATRON_LM/megatron hides the installed megatron-core: remove it, or unset MEGATRON_LM_PATH"
default_data
[ -f "$DATA_PREFIX/tokenizer.model" ] || die "DATA_PREFIX=$DATA_PREFIX holds no tokenizer.model: write a data set there with scripts/prepare_data.py"
"$PYTHON" "$ROOT/scripts/prepare_data.py" verify "$DATA_PREFIX"
mkdir -p "$EXP_DIR"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" "${run[@]}" 2>&1 | tee -a "$EXP_DIR/train.log"
