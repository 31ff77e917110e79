"""Runs the comparison of exp/paper/compare.sh and writes its report: see monitor.paper_run and benchmarks/report.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megablocks.monitor.paper_run import main  # noqa: E402

if __name__ == "__main__":
    status = main()
    if status == 0 and os.environ.get("DRY_RUN") != "1":
        status = subprocess.run([sys.executable, str(ROOT / "benchmarks/report.py"), sys.argv[1]]).returncode
    sys.exit(status)
