"""`python -m megablocks COMMAND`: see megablocks.tool."""

import sys

from megablocks.tool.commands import program

if __name__ == "__main__":
    sys.exit(program())
