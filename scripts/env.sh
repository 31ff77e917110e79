# shellcheck shell=bash
# Source this file. `use_env EXTRA…` sets PYTHON to an interpreter that satisfies the pins of pyproject.toml for these
# extras: $PYTHON if it is set, otherwise the active interpreter if it fits, otherwise .venv. A missing .venv is made,
# with a Python >= 3.12. `is_dry_run` reads DRY_RUN.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

is_dry_run() { # whether DRY_RUN=1 asks to only print the commands; a value other than 0, 1 and none ends the script
    case ${DRY_RUN:-0} in
    0) return 1 ;;
    1) return 0 ;;
    esac
    echo "${0##*/}: DRY_RUN=$DRY_RUN: must be 0 or 1" >&2
    exit 1
}

_fits() { # PYTHON EXTRA…: fails with the reason on stdout unless PYTHON satisfies the pins
    local python=$1
    shift
    "$python" "$_root/scripts/check_env.py" "$@" 2>/dev/null || {
        local status=$?
        [ "$status" -eq 1 ] || echo "it cannot run scripts/check_env.py"
        return 1
    }
}

_base_python() { # prints a Python >= 3.12 with venv, from PATH or pyenv. 3.12 comes first, because we test with it.
    local candidate
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13,14}*/bin/python; do
        # A pyenv shim prints the interpreter that it starts, and fails if there is none.
        "$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 12); print(sys.executable)' \
            2>/dev/null && return 0
    done
    return 1
}

_install() ( # PYTHON PIP_ARGUMENT…: by uv, in a third of pip's time, unless pip has its own index, which uv ignores
    python=$1
    shift
    pip=("$python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile)
    [[ $("$python" -m pip config list) != *.index-url=* ]] && "${pip[@]}" uv &&
        "$python" -m uv pip install --quiet --python "$python" "$@" && exit
    "${pip[@]}" "$@"
) >&2

_make_env() { # EXTRA…: makes .venv with this checkout installed in place; completes an existing .venv, never clears it
    local base extras
    extras=$(IFS=, && echo "$*")
    if "$_root/.venv/bin/python" -c 'import sys, pip; assert sys.version_info >= (3, 12)' 2>/dev/null; then
        echo "env: completing $_root/.venv" >&2
    elif base=$(_base_python); then
        echo "env: making $_root/.venv with $base" >&2
        "$base" -m venv "$_root/.venv" || return 1
    elif command -v uv >/dev/null; then
        echo "env: making $_root/.venv with uv" >&2
        uv venv --quiet --allow-existing --seed --python 3.12 "$_root/.venv" || return 1
    else
        echo "env: no Python >= 3.12 on PATH or in pyenv, and no uv: install one (\"pyenv install 3.12\" or \"pip install uv\") and run this again" >&2
        return 1
    fi
    echo "env: installing megablocks[$extras] (torch downloads some gigabytes)" >&2
    _install "$_root/.venv/bin/python" -c "$_root/scripts/constraints.txt" -e "${_root}[$extras]" || {
        echo "env: pip could not install megablocks[$extras] into $_root/.venv: see its message above" >&2
        return 1
    }
}

use_env() {
    local reason active
    if [ -n "${PYTHON:-}" ]; then
        reason=$(_fits "$PYTHON" "$@") && return 0
        echo "env: PYTHON=$PYTHON does not fit: $reason; install it there, or unset PYTHON to use .venv" >&2
        return 1
    fi
    for active in python3 python "$_root/.venv/bin/python"; do
        if command -v "$active" >/dev/null && _fits "$active" "$@" >/dev/null; then
            PYTHON=$(command -v "$active")
            return 0
        fi
    done
    _make_env "$@" || return 1
    PYTHON=$_root/.venv/bin/python
    reason=$(_fits "$PYTHON" "$@") || {
        echo "env: $_root/.venv does not fit after the installation: $reason" >&2
        return 1
    }
}
