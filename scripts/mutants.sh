#!/usr/bin/env bash
# Shows that each test fails when the behavior that it tests is broken. Usage: scripts/mutants.sh [ID…]  (default: all)
# tests/mutants/<ID>.patch breaks one behavior, <ID>-<path>.patch the same behavior on another path of the code. A
# test_<ID>_* must fail in a scratch copy with the patch.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
use_env megatron dev

patches=()
for id in "$@"; do
    mapfile -t -O ${#patches[@]} patches < <(compgen -G "tests/mutants/$id.patch" || true; compgen -G "tests/mutants/$id-*.patch" || true)
done
[ $# -gt 0 ] || patches=(tests/mutants/*.patch)
[ ${#patches[@]} -gt 0 ] || {
    echo "mutants: no patch in tests/mutants for: ${*:-any ID}" >&2
    exit 1
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=1
survivors=0
printf '%-12s %-10s %8s  %s\n' mutant verdict seconds detail
for patch in "${patches[@]/#/$PWD/}"; do
    mutant=$(basename "$patch" .patch)
    if head -n 1 "$patch" | grep -q '^Needs a GPU' && ! nvidia-smi -L &>/dev/null; then
        printf '%-12s %-10s %8d  %s\n' "$mutant" "no GPU" 0 "not run here"
        continue
    fi
    tree=$scratch/$mutant
    mkdir "$tree"
    git ls-files --cached --others --exclude-standard -z | xargs -0 cp -P --parents -t "$tree"
    start=$SECONDS
    status=0
    id=${mutant%%-*}
    mapfile -t files < <(grep -rl --include='test_*.py' "def test_${id}_" "$tree/tests")
    [ ${#files[@]} -gt 0 ] || files=("$tree/tests") # pytest collects nothing, so the mutant survives
    out=$(cd "$tree" && git apply "$patch" && PYTHONPATH=$tree "$PYTHON" -m pytest -p no:cacheprovider -q --tb=no -r fE -x \
        -m "slow or not slow" -k "test_${id}_" "${files[@]}" 2>&1) || status=$?
    detail=$(grep -E '^(FAILED|ERROR) ' <<<"$out" || tail -n 1 <<<"$out")
    # pytest exits with 1 if a test failed. Another status (all passed, nothing collected, bad patch) proves nothing.
    if [ "$status" -eq 1 ] && [[ $detail == FAILED* ]]; then
        verdict=killed
    else
        verdict=SURVIVED
        survivors=$((survivors + 1))
    fi
    printf '%-12s %-10s %8d  %s\n' "$mutant" "$verdict" $((SECONDS - start)) "${detail:0:120}"
    rm -rf "$tree"
done
echo "mutants: ${#patches[@]} run, $survivors survived"
[ "$survivors" -eq 0 ]
