# shellcheck shell=bash
# Sourced by the scripts of this folder. A script says what its experiment is; this file says how any of them is run.
#
# Environment (all optional):
#   NGPU            processes on this machine, one a GPU (on a machine without a GPU: CPU processes)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   several machines, as torchrun's; alone, a free port is taken
#   STEPS           training steps, where the positional argument is not given
#   DATA_PREFIX     folder written by scripts/prepare_data.py (default data/stdlib)
#   FLAGS           more driver flags, which override the script's (FLAGS="--log-interval 10 --eval-iters 5")
#   PYTHON          interpreter (default: the active one if it satisfies pyproject.toml, else .venv)
#   DRY_RUN=1       print the command and stop

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
DATA_PREFIX=$(realpath -m -- "${DATA_PREFIX:-$ROOT/data/stdlib}")

# What all published runs share (arXiv 2211.15841 and the scripts of its repository).
# 512 sequences of 1024 tokens a step: 20,000 steps are 10B tokens.
# shellcheck disable=SC2034  # read by the scripts
PUBLISHED=(--seq-length 1024 --max-position-embeddings 1024 --make-vocab-size-divisible-by 1024
    --global-batch-size 512 --optimizer adam --lr-decay-style cosine --lr-warmup-fraction 0.01 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 100 --log-interval 100 --save-interval 2000)

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

gpus() { # how many this machine has
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
}

find_python() {
    # shellcheck source=../scripts/env.sh
    source "$ROOT/scripts/env.sh"
    use_env megatron || exit 1
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

default_data() { # the standard library's text, where there is no data set yet
    [ "${DRY_RUN:-0}" != 1 ] && [ ! -e "$DATA_PREFIX" ] || return 0
    find_python
    "$PYTHON" "$ROOT/scripts/prepare_data.py" --out "$DATA_PREFIX"
}

_port_is_free() {
    "$PYTHON" -c 'import socket, sys; socket.socket().bind(("", int(sys.argv[1])))' "$1" 2>/dev/null
}

_rendezvous() { # sets RENDEZVOUS, torchrun's arguments for one or several machines
    if [ "$NNODES" -eq 1 ] && [ -z "${MASTER_PORT:-}" ]; then
        RENDEZVOUS=(--standalone)
        return
    fi
    [ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is unset: NNODES=$NNODES needs the first machine's address"
    RENDEZVOUS=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}")
}

_check_machine() {
    local gpus
    gpus=$(gpus)
    [ "$gpus" -eq 0 ] || [ "$NGPU" -le "$gpus" ] || die "NGPU=$NGPU: this machine has $gpus, set NGPU to at most that"
    [ -f "$DATA_PREFIX/manifest.json" ] || die "DATA_PREFIX=$DATA_PREFIX holds no manifest.json: write a data set there with scripts/prepare_data.py"
    if [ "${RENDEZVOUS[0]}" != --standalone ] && [ "$NODE_RANK" -eq 0 ]; then
        _port_is_free "${MASTER_PORT:-6000}" || die "MASTER_PORT=${MASTER_PORT:-6000} is in use: choose another, or unset it on a single machine"
    fi
}

_open_run_dir() { # sets RESUME; an empty folder is a fresh run, a folder with a checkpoint of the same command goes on
    RESUME=()
    if [ -d "$EXP_DIR" ] && [ -n "$(ls -A "$EXP_DIR")" ] && [ "$NODE_RANK" -eq 0 ]; then
        [ "$(cat "$EXP_DIR/command.txt" 2>/dev/null)" = "$1" ] || die "EXP_DIR=$EXP_DIR is not empty and is no run of this command: choose another folder or remove it"
        compgen -G "$EXP_DIR/checkpoints/iter_*" >/dev/null || die "EXP_DIR=$EXP_DIR is not empty and holds no checkpoint to resume from: choose another folder or remove it"
    fi
    mkdir -p "$EXP_DIR"
    ! compgen -G "$EXP_DIR/checkpoints/iter_*" >/dev/null || RESUME=(--load "$EXP_DIR/checkpoints")
}

# launch EXP_DIR DRIVER_FLAG…: one training run, everything about it kept in EXP_DIR.
launch() {
    EXP_DIR=$(realpath -m -- "$1")
    shift
    local command run flags
    _rendezvous
    read -ra flags <<<"${FLAGS:-}"
    command=(-m megablocks.megatron.pretrain_gpt "$@" --data-prefix "$DATA_PREFIX"
        --megablocks-run-dir "$EXP_DIR" --save "$EXP_DIR/checkpoints" --tensorboard-dir "$EXP_DIR/tensorboard" "${flags[@]}")
    run=(-m torch.distributed.run "${RENDEZVOUS[@]}" --nproc-per-node "$NGPU" "${command[@]}")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        printf '%q ' "${PYTHON:-python3}" "${run[@]}"
        echo
        return
    fi
    find_python
    _check_machine
    _open_run_dir "${command[*]@Q}"
    # One thread a process unless asked otherwise; tensor parallelism needs its kernels queued in order.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    [ "$NODE_RANK" -ne 0 ] || echo "${command[*]@Q}" >"$EXP_DIR/command.txt"
    "$PYTHON" "${run[@]}" "${RESUME[@]}" 2>&1 | tee -a "$EXP_DIR/train.log" || {
        # torchrun's own report of the failure hides the driver's line, so that comes again, last.
        die "failed: $(grep '^pretrain_gpt: ' "$EXP_DIR/train.log" | tail -n 1 || echo "see $EXP_DIR/train.log")"
    }
}
