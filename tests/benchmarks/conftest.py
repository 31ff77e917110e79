"""Put the folder of the benchmarks on the path. They are scripts and no package."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))  # last, because some scripts have the names of test folders
