#!/usr/bin/env bash
# Builds sdist and wheel of the last commit, checks them, and installs the wheel in fresh environments that run it.
# Usage: scripts/release_check.sh [OUT]      OUT (default build/release) gets sdist, wheel and one log per environment
#   PYTHONS="3.10 3.12"        versions of Python, from PATH or pyenv
#   TORCHES="oldest newest"    releases of torch within the pins: oldest, newest, or a version
#   KEEP=1                     keeps the environments (5 GB each); otherwise each is removed when its check ends
#   DRY_RUN=1                  only prints what would run
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

[[ $# -le 1 && ${1:-} != -* ]] || {
    echo "release: $*: must be one folder or nothing" >&2
    exit 1
}
out=${1:-build/release}
read -ra pythons <<<"${PYTHONS:-3.10 3.12}"
read -ra torches <<<"${TORCHES:-oldest newest}"
# The tests of an installed wheel: those that need no GPU, no Megatron and no other package.
tests=(tests/test_config.py tests/moe/test_layer.py tests/moe/test_experts.py tests/moe/test_route.py
    tests/moe/test_batch_invariant.py tests/ops/test_dispatch.py)

oldest=$(sed -n 's/^ *"torch>=\([0-9.]*\)",$/\1/p' pyproject.toml)
requirement() { # TORCH: the requirement for pip
    case $1 in
    oldest) echo "torch==$oldest.*" ;;
    newest) echo torch ;;
    *) echo "torch==$1" ;;
    esac
}
find_python() { # VERSION: an interpreter with venv
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python; do
        "$candidate" -c 'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null && return 0
    done
    echo "release: no Python $1 on PATH or in pyenv: install it, or leave it out of PYTHONS" >&2
    return 1
}
if is_dry_run; then
    echo "python -m build --outdir $out    # of the last commit"
    echo "python -m twine check --strict $out/*"
    for version in "${pythons[@]}"; do
        for torch in "${torches[@]}"; do
            echo "python$version -m pip install $out/*.whl '$(requirement "$torch")' && python scripts/release_smoke.py && pytest ${tests[*]}"
        done
    done
    exit 0
fi

work=$(mktemp -d)
trap '[ "${KEEP:-0}" = 1 ] && echo "release: kept $work" || rm -rf "$work"' EXIT
mkdir -p "$out" "$work/source"
rm -f "$out"/*.whl "$out"/*.tar.gz
out=$(cd "$out" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONPATH=

echo "release: building"
git archive HEAD | tar -x -C "$work/source"
"$(find_python "${pythons[-1]}")" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q build twine
"$work/tools/bin/python" -m build --outdir "$out" "$work/source" >"$out/build.log" 2>&1 || {
    tail -20 "$out/build.log"
    exit 1
}
"$work/tools/bin/python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz

status=0
for version in "${pythons[@]}"; do
    base=$(find_python "$version")
    for torch in "${torches[@]}"; do
        name=python$version-torch-$torch env=$work/env
        log=$out/$name.log
        (
            set -e # in the background, because "if" would turn it off
            exec >"$log" 2>&1
            "$base" -m venv --clear "$env"
            "$env/bin/python" -m pip install -q "$(requirement "$torch")" "$out"/*.whl
            mkdir -p "$work/empty" && cd "$work/empty" # the package there is the installed one
            "$env/bin/python" "$work/source/scripts/release_smoke.py"
            "$env/bin/python" -m pip install -q pytest pytest-timeout pytest-xdist hypothesis
            rm -rf "$work/tests" && mkdir "$work/tests" && cd "$work/tests"
            cp -r "$work/source/tests" "$work/source/pyproject.toml" .
            OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -q "${tests[@]}"
        ) &
        if wait $!; then
            echo "release: $name ok: $(grep '^release_smoke' "$log"); $(tail -1 "$log")"
        else
            echo "release: $name FAILED, the end of $log:" && tail -15 "$log"
            status=1
        fi
    done
done
exit "$status"
