"""The version, in the module where megablocks 0.10 has it."""

from megablocks import __version__ as __version__
