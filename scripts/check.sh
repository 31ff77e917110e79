#!/usr/bin/env bash
# Static checks: ruff, import-linter, mypy, shellcheck, hadolint, and the site where its tools are installed. Runs all of them, and fails if one of them fails.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
use_env megatron dev

bin=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
mapfile -t shell_files < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)
failed=()
check() { # NAME COMMAND…: prints the output of COMMAND only if it fails
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then
        echo "check: $name ok"
    else
        printf '%s\ncheck: %s FAILED\n' "$out" "$name"
        failed+=("$name")
    fi
}

check ruff "$bin/ruff" check .
check imports "$bin/lint-imports" --no-cache
check types "$bin/mypy"
check shell "$bin/shellcheck" -x -P SCRIPTDIR "${shell_files[@]}"
[ ! -f Dockerfile ] || check dockerfile "$bin/hadolint" Dockerfile
if "$PYTHON" -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; then # the extra docs
    check site bash scripts/site.sh
fi
[ ${#failed[@]} -eq 0 ] || {
    echo "check: failed: ${failed[*]}"
    exit 1
}
