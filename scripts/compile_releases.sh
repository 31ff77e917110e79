#!/usr/bin/env bash
# Compile kernels for sm_90 with the oldest and the newest release of Triton that the package supports. Needs no GPU.
# Usage: scripts/compile_releases.sh [--all]
#   --all      every kernel (12 minutes of a core); without it only the kernels for Hopper, whose language, Gluon, is
#              not stable, and only the first four binaries of each
#   DRY_RUN=1  only prints the commands
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

RELEASES=(3.6.0 3.9.0)
families=(fused_up grouped_hopper grouped_hopper_dw pieces fused_gradient_hopper sparse_hopper)
which=(--few "${families[@]}")
case $* in
"") ;;
--all) which=() ;;
*)
    echo "compile: $*: must be --all or nothing" >&2
    exit 1
    ;;
esac
if is_dry_run; then
    for release in "${RELEASES[@]}"; do
        echo "python tests/ops/compile_cases.py 90 ${which[*]}  # with triton==$release"
    done
    exit 0
fi
use_env megatron dev
export PYTHON

compile() ( # RELEASE
    set -e
    folder=.venv-triton-$1
    mkdir -p "$folder"
    exec >"$folder/log" 2>&1
    [ -d "$folder/triton" ] || "$PYTHON" -m pip install -q --no-deps --target "$folder" "triton==$1"
    PYTHONPATH=$folder:$PWD TRITON_CACHE_DIR=$folder/cache "$PYTHON" tests/ops/compile_cases.py 90 "${which[@]}"
)

for release in "${RELEASES[@]}"; do
    compile "$release" &
    running+=($!)
done
status=0
for i in "${!RELEASES[@]}"; do
    release=${RELEASES[i]}
    if wait "${running[i]}"; then
        echo "compile: the kernels compile for sm_90 with Triton $release"
    else
        status=1
        echo "compile: failed with Triton $release; .venv-triton-$release/log ends with:" >&2
        grep -v -E 'nanobind|leaked|refleaks' ".venv-triton-$release/log" | tail -n 20 >&2
    fi
done
exit "$status"
