"""The benchmarks are scripts beside the package: their folder is put on the path."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))  # last: some names there are those of test folders
