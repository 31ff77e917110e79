"""The driver's tests share their launcher with tests/reliability."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "reliability"))

from fixtures import driver, tiny_data, zygote  # noqa: E402, F401
