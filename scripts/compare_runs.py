"""Trains an experiment with several mlp_impls or layouts and compares the runs: see `--help` and monitor.compare."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megablocks.monitor.compare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
