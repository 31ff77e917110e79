#!/usr/bin/env bash
# Clone pinned upstreams beside this file. Usage: third_party/fetch.sh [NAME…]     (default: every name in pins.txt)
set -euo pipefail
cd "$(dirname "$0")"

names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(awk '!/^#/ {print $1}' pins.txt)
for name in "${names[@]}"; do
    read -r url commit < <(awk -v name="$name" '$1 == name {print $2, $3}' pins.txt) || {
        echo "third_party: $name is not in pins.txt, which has: $(awk '!/^#/ {print $1}' pins.txt | xargs)" >&2
        exit 1
    }
    if [ ! -d "$name" ]; then
        # Cloned aside and renamed when whole, so that an interrupted clone is never taken for the real one.
        rm -rf "$name.part"
        git init --quiet "$name.part"
        # Megatron-LM's scripts run on the megatron-core of PyPI; a second "megatron" beside them would hide it.
        [ "$name" != Megatron-LM ] || git -C "$name.part" sparse-checkout set --no-cone '/*' '!/megatron/'
        git -C "$name.part" fetch --quiet --depth 1 "$url" "$commit"
        git -C "$name.part" -c advice.detachedHead=false checkout --quiet FETCH_HEAD
        mv "$name.part" "$name"
    fi
    found=$(git -C "$name" rev-parse HEAD 2>/dev/null) || found="no commit"
    [ "$found" = "$commit" ] && [ -z "$(git -C "$name" status --porcelain)" ] || {
        echo "third_party: $name is at $found or was edited, pinned is $commit: remove third_party/$name and run this again" >&2
        exit 1
    }
    echo "third_party: $name is at $commit"
done
