"""A training step as a table of parts with their bounds, and a picture: see `--help` and monitor.profile_step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megablocks.monitor.profile_step import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
