#!/usr/bin/env bash
# Static checks: ruff, import-linter, mypy, shellcheck, hadolint, and the site if its tools are installed.
# Runs all of them, and fails if one of them fails.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
use_env megatron dev

bin=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
mapfile -t shell_files < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)
outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
names=() running=() failed=()
check() { # NAME COMMAND…: starts COMMAND; its output is printed only if it fails
    names+=("$1")
    "${@:2}" >"$outputs/$1" 2>&1 &
    running+=($!)
}

check types "$bin/mypy" # first, because it takes longest, on one core
check ruff "$bin/ruff" check .
check imports "$bin/lint-imports" --no-cache
check shell "$bin/shellcheck" -x -P SCRIPTDIR "${shell_files[@]}"
[ ! -f Dockerfile ] || check dockerfile "$bin/hadolint" Dockerfile
if "$PYTHON" -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; then # the extra docs
    check site bash scripts/site.sh
fi
for i in "${!names[@]}"; do
    if wait "${running[i]}"; then
        echo "check: ${names[i]} ok"
    else
        cat "$outputs/${names[i]}"
        echo "check: ${names[i]} FAILED"
        failed+=("${names[i]}")
    fi
done
[ ${#failed[@]} -eq 0 ] || {
    echo "check: failed: ${failed[*]}"
    exit 1
}
