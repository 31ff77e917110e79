#!/usr/bin/env bash
# Builds the documentation site from docs/ into build/site. A dead link, a dead anchor or a warning fails.
# Usage: scripts/site.sh [serve]
#   serve      shows the site on http://127.0.0.1:8000 and builds it again at each change
#   PYTHON=…   an interpreter with the tools; default: the active one if it has them, or .venv-docs, made without torch
#   DRY_RUN=1  only prints the command
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

case $* in
"") what=(build --strict --quiet) ;;
serve) what=(serve) ;;
*)
    echo "site: $*: must be serve or nothing" >&2
    exit 1
    ;;
esac
if is_dry_run; then
    echo "python -m mkdocs ${what[*]}"
    exit 0
fi
has_tools() { "$1" -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; }
PYTHON=${PYTHON:-python3}
if ! has_tools "$PYTHON"; then
    PYTHON=.venv-docs/bin/python
    if ! has_tools "$PYTHON"; then
        echo "site: making .venv-docs" >&2
        python3 -m venv .venv-docs
        mapfile -t pins < <("$PYTHON" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")')
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "${pins[@]}"
    fi
fi
NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs "${what[@]}"
