#!/usr/bin/env bash
# The image with this checkout's parent folder (data sets beside it included) at /mount, all GPUs, the host's shared memory.
# Usage: docker.sh [COMMAND…]     DRY_RUN=1 prints the docker command alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
terminal=(-i)
[ ! -t 0 ] || terminal=(-it) # where the input is no terminal, docker refuses -t
command=(docker run --rm "${terminal[@]}" --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864
    -v "$(dirname "$here"):/mount" -w "/mount/$(basename "$here")" "${IMAGE:-megablocks-dev}" "$@")
source "$here/scripts/env.sh"
if is_dry_run; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
command -v docker >/dev/null || {
    echo "docker.sh: docker is not installed; without it run the scripts of exp/ directly" >&2
    exit 1
}
exec "${command[@]}"
