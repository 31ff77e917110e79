"""The largest micro-batch of an experiment that fits into memory: see `--help` and monitor.micro_batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megablocks.monitor.micro_batch import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
