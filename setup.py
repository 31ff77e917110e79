"""All metadata stands in pyproject.toml.

Nothing here compiles or imports torch, so the package installs on a machine with neither torch nor a compiler.
"""

from setuptools import setup

setup()
