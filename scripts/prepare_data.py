"""Prepare a data set, or check one: see `--help` and `verify`. A thin main over megablocks.data.prepare."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megablocks.data.prepare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
