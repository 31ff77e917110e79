"""Put the folder of the scripts on the path, as Python does for the script that it runs."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
