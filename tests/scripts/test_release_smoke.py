"""scripts/release_smoke.py runs an installed wheel; without one it ends in a line that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_package_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    for path, found in ((ROOT, ROOT / "megablocks/__init__.py"), (tmp_path, None)):
        command = [sys.executable, "-S", str(ROOT / "scripts/release_smoke.py")]  # -S: without site-packages
        environment = {**os.environ, "PYTHONPATH": str(path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith(f"release_smoke: megablocks is {found}: must be installed from a wheel into /")
