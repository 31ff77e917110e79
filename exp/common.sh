# shellcheck shell=bash
# Sourced by the scripts of this folder. Each script describes one experiment; this file runs it.
#
# Environment (all optional):
#   NGPU            processes on this machine, one for each GPU (without a GPU: CPU processes)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   for several machines: their number, the number of this one, and name and
#                   port of machine 0, where they connect; one machine needs none of these
#   LOCAL_ADDR      name of this machine for the others (default: its host name)
#   MAX_RESTARTS    how often torchrun starts the ranks again after one died (default 0); they resume automatically
#   STEPS           training steps, if the positional argument is not given
#   DATA_PREFIX     folder written by scripts/prepare_data.py (default data/stdlib)
#   FLAGS           more driver flags, which override those of the script (FLAGS="--log-interval 10 --eval-iters 5")
#   PYTHON          interpreter (default: the active one if it satisfies pyproject.toml, otherwise .venv)
#   DRY_RUN=1       print the command and stop
#
# SIGINT (Ctrl-C), SIGTERM and SIGHUP let every rank save and exit; the same command then resumes. A second signal,
# three seconds later or more, kills the ranks.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=../scripts/env.sh
source "$ROOT/scripts/env.sh"
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MAX_RESTARTS=${MAX_RESTARTS:-0}
DATA_PREFIX=$(realpath -m -- "${DATA_PREFIX:-$ROOT/data/stdlib}")

# What all published runs share (arXiv 2211.15841 and the scripts of its repository).
# 512 sequences of 1024 tokens a step: 20,000 steps are 10B tokens.
# shellcheck disable=SC2034  # read by the scripts
PUBLISHED=(--seq-length 1024 --max-position-embeddings 1024 --make-vocab-size-divisible-by 1024
    --global-batch-size 512 --optimizer adam --lr-decay-style cosine --lr-warmup-fraction 0.01 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 100 --log-interval 100 --save-interval 2000)

say() {
    echo "${0##*/}: $*" >&2
}

die() {
    say "$@"
    exit 1
}

_check_call() { # ARGUMENT…: checks the script's arguments against its line "# Usage:"; --help prints its first comment
    local script=${BASH_SOURCE[-1]} usage names required
    usage=$(sed -n 's/^# Usage: //p' "$script")
    usage=${usage%%  *}
    [ -n "$usage" ] || return 0
    if [[ ${1:-} =~ ^(-h|--help)$ ]]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"
        exit
    fi
    read -ra names <<<"$usage"
    read -ra required <<<"${usage%%\[*}"
    [[ ${1:-} != -* && " $* " != *" --"* ]] || die "$*: holds a flag, which belongs in FLAGS; usage: $usage"
    [ $# -lt ${#names[@]} ] || die "$*: too many arguments; usage: $usage"
    [ $# -ge $((${#required[@]} - 1)) ] || die "${required[1]} is missing; usage: $usage"
    is_dry_run || true # refuses another value now
}

gpus() { # the number of GPUs of this machine
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
}

find_python() {
    use_env megatron || exit 1
    # UTF-8 mode: file names and logs are the same in every locale.
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUTF8=1
}

default_data() { # makes data/stdlib from the standard library's text, if DATA_PREFIX is that folder and it is missing
    ! is_dry_run && [ "$DATA_PREFIX" = "$ROOT/data/stdlib" ] && [ ! -e "$DATA_PREFIX" ] || return 0
    _check_settings
    find_python
    "$PYTHON" "$ROOT/scripts/prepare_data.py" --out "$DATA_PREFIX"
}

_check_whole() { # NAME LOW HIGH: the variable NAME must hold a whole number of this range
    [[ ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "${!1}" -ge "$2" ] && [ "${!1}" -le "$3" ] ||
        die "$1=${!1}: must be a whole number from $2 to $3"
}

_check_settings() {
    _check_whole NGPU 1 1024
    _check_whole STEPS 1 999999999
    _check_whole NNODES 1 65536
    [ "$NNODES" -gt 1 ] || [ "$NODE_RANK" = 0 ] || die "NODE_RANK=$NODE_RANK: must be 0 because NNODES=$NNODES"
    _check_whole NODE_RANK 0 $((NNODES - 1))
    _check_whole MAX_RESTARTS 0 1000
    [ -z "${MASTER_PORT:-}" ] || _check_whole MASTER_PORT 1 65535
    [ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] ||
        die "MASTER_ADDR is unset: NNODES=$NNODES needs the address of the first machine"
}

_rendezvous() { # sets RENDEZVOUS, torchrun's arguments for one or several machines
    local host=false
    [ "$NODE_RANK" -ne 0 ] || host=true
    RENDEZVOUS=(--standalone)
    if [ "$NNODES" -gt 1 ] || [ -n "${MASTER_PORT:-}" ]; then
        # c10d, because a machine that returns cannot join a static rendezvous. Each waits ten minutes for the others.
        RENDEZVOUS=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id megablocks
            --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-6000}"
            --rdzv-conf "is_host=$host,join_timeout=600,read_timeout=600")
        [ -z "${LOCAL_ADDR:-}" ] || RENDEZVOUS+=(--local-addr "$LOCAL_ADDR")
    fi
    [ "$MAX_RESTARTS" -eq 0 ] || RENDEZVOUS+=(--max-restarts "$MAX_RESTARTS")
}

_check_machine() {
    local gpus problem port=${MASTER_PORT:-6000}
    gpus=$(gpus)
    [ "$gpus" -eq 0 ] || [ "$NGPU" -le "$gpus" ] || die "NGPU=$NGPU: must be at most $gpus, the GPUs of this machine"
    [ -f "$DATA_PREFIX/manifest.json" ] ||
        die "DATA_PREFIX=$DATA_PREFIX holds no manifest.json: correct it or make it (scripts/prepare_data.py --out)"
    if [ "${RENDEZVOUS[0]}" != --standalone ] && [ "$NODE_RANK" -eq 0 ]; then
        problem=$("$PYTHON" -c 'import socket, sys; socket.create_server(("", int(sys.argv[1])))' "$port" 2>&1) || {
            problem=${problem##*] }
            die "MASTER_PORT=$port cannot be opened (${problem%% (*}): choose another, or unset it on a single machine"
        }
    fi
}

_open_run_dir() { # COMMAND: makes and locks EXP_DIR, sets RESUME. The folder must be empty or a run of COMMAND
    local problem content choose="choose another folder"
    RESUME=()
    [ ! -e "$EXP_DIR" ] || [ -d "$EXP_DIR" ] || die "EXP_DIR=$EXP_DIR is a file: $choose"
    problem=$(mkdir -p -- "$EXP_DIR" 2>&1) || die "EXP_DIR=$EXP_DIR cannot be made (${problem##*: }): $choose"
    if [ "$NODE_RANK" -eq 0 ]; then # the other machines may share the folder
        content=$(ls -A -I train.log "$EXP_DIR" 2>/dev/null) || true # another machine may have started the log
        [ -z "$content" ] || [ "$(cat "$EXP_DIR/command.txt" 2>/dev/null)" = "$1" ] ||
            die "EXP_DIR=$EXP_DIR is not empty and is no run of this command: $choose or remove it"
        { exec {LOCK}>>"$EXP_DIR/command.txt"; } 2>/dev/null || die "EXP_DIR=$EXP_DIR cannot be written to: $choose"
        # The lock ends with the last process that inherits the file descriptor: the launcher or torchrun.
        flock -n "$LOCK" 2>/dev/null || case $? in
        1) die "EXP_DIR=$EXP_DIR is in use by another run: $choose, or wait until that run ends" ;;
        *) say "EXP_DIR=$EXP_DIR cannot be locked here: do not start a second run in it" ;;
        esac
        # A job that restarts automatically may have been interrupted before its first save.
        [ -z "$content" ] || [ "$MAX_RESTARTS" -gt 0 ] || compgen -G "$EXP_DIR/checkpoints/iter_*" >/dev/null ||
            die "EXP_DIR=$EXP_DIR is not empty and holds no checkpoint to resume from: $choose or remove it"
        # Only once: a kill during a second write would leave it empty.
        [ -n "$content" ] || { echo "$1" >"$EXP_DIR/command.txt"; } 2>/dev/null || {
            rm -f "$EXP_DIR/command.txt" # a part of the command would refuse the same command later
            die "EXP_DIR=$EXP_DIR cannot be written to: make room or $choose"
        }
    fi
    ! compgen -G "$EXP_DIR/checkpoints/iter_*" >/dev/null || RESUME=(--load "$EXP_DIR/checkpoints")
}

_stop() { # timeout and some shells send a signal twice, so a second signal counts only after more than two seconds
    INTERRUPTED=1
    if [ -z "$STOPPED_AT" ]; then
        STOPPED_AT=$SECONDS
        say "stopping: every rank saves after its step and exits; another signal kills the ranks without a save"
        [ -z "$TORCHRUN" ] || kill -TERM "$TORCHRUN" 2>/dev/null || true
    elif [ $((SECONDS - STOPPED_AT)) -ge 3 ]; then # whole seconds: the difference can be little more than two
        kill -QUIT "$TORCHRUN" 2>/dev/null || true
    fi
}

_train() { # ARGUMENT…: runs torchrun.py and copies its output to train.log; returns torchrun's exit status
    local log tee status
    INTERRUPTED='' STOPPED_AT='' TORCHRUN=''
    trap _stop INT TERM HUP
    # Background processes and `wait`, because bash runs a trap only after a foreground process has ended.
    exec {log}> >(trap '' INT TERM HUP && exec tee -a "$EXP_DIR/train.log")
    tee=$!
    "$PYTHON" "$@" >&"$log" 2>&1 &
    TORCHRUN=$!
    [ -z "$STOPPED_AT" ] || kill -TERM "$TORCHRUN"
    until
        INTERRUPTED='' status=0
        wait "$TORCHRUN" || status=$?
        [ -z "$INTERRUPTED" ]
    do :; done
    exec {log}>&-
    wait "$tee" || true
    trap - INT TERM HUP
    return "$status"
}

# launch EXP_DIR DRIVER_FLAG…: one training run, which keeps everything in EXP_DIR.
launch() {
    EXP_DIR=$(realpath -m -- "$1")
    shift
    local command run flags logged reason
    _check_settings
    _rendezvous
    read -d '' -ra flags <<<"${FLAGS:-}" || true # FLAGS can have several lines
    command=(-m megablocks.megatron.pretrain_gpt "$@" --data-prefix "$DATA_PREFIX"
        --megablocks-run-dir "$EXP_DIR" --save "$EXP_DIR/checkpoints" --tensorboard-dir "$EXP_DIR/tensorboard"
        "${flags[@]}")
    # --load even for an empty folder: ranks that torchrun starts again with this command line then resume.
    run=("$ROOT/scripts/torchrun.py" "${RENDEZVOUS[@]}" --nproc-per-node "$NGPU" "${command[@]:0:2}"
        --load "$EXP_DIR/checkpoints" "${command[@]:2}")
    if is_dry_run; then
        printf '%q ' "${PYTHON:-python3}" "${run[@]}"
        echo
        return
    fi
    find_python
    _check_machine
    # How bash quotes characters outside of ASCII depends on the locale; in C.UTF-8 the file is the same everywhere.
    _open_run_dir "$({ LC_ALL=C.UTF-8; } 2>/dev/null; echo "${command[*]@Q}")"
    # One thread per process unless set otherwise; tensor parallelism needs its kernels queued in order.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    logged=$(wc -c 2>/dev/null <"$EXP_DIR/train.log" || echo 0)
    if _train "${run[@]}" "${RESUME[@]}"; then
        [ -n "$STOPPED_AT" ] || return 0
        if compgen -G "$EXP_DIR/checkpoints/iter_*" >/dev/null; then
            say "stopped and saved: the same command with the same EXP_DIR resumes ($EXP_DIR)"
        else
            say "stopped: $EXP_DIR holds no checkpoint, so it cannot resume; FLAGS give another --save"
        fi
        return
    fi
    # torchrun's own report of the failure hides the driver's line, so it is printed again at the end.
    reason=$(tail -c "+$((logged + 1))" "$EXP_DIR/train.log" | grep '^pretrain_gpt: ' | tail -n 1 || true)
    [ -z "$STOPPED_AT" ] || die "stopped before a save: ${reason:-see $EXP_DIR/train.log}"
    die "failed: ${reason:-see $EXP_DIR/train.log}"
}

_check_call "$@"
