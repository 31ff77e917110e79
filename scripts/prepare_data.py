"""Makes a data set, or checks one (`verify DIR`): see `--help` and megablocks.data.prepare."""

import os
import sys
from pathlib import Path

if not sys.flags.utf8_mode:  # file names are then the same text in every locale
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from megablocks.data.prepare import main
except ModuleNotFoundError as error:
    print(f"prepare_data: error: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
