"""Checks the running Python against the pins of pyproject.toml for the given extras. Exits 0, or 1 with the reason.

    python scripts/check_env.py megatron dev
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

MIN_PYTHON = (3, 12)  # megatron-core needs it


def problem(extras: list[str]) -> str | None:
    """One line about the first pin that is not satisfied, or None."""
    if sys.version_info < MIN_PYTHON:
        return f"python is {sys.version.split()[0]}, need >= {'.'.join(map(str, MIN_PYTHON))}"
    import tomllib

    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return "packaging is not installed"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            return f"{extra!r} is not an extra of pyproject.toml"
    pins = [*project["dependencies"], *(pin for extra in extras for pin in project["optional-dependencies"][extra])]
    for pin in map(Requirement, pins):
        if pin.marker and not pin.marker.evaluate():
            continue
        try:
            found = metadata.version(pin.name)
        except metadata.PackageNotFoundError:
            return f"{pin.name} is not installed"
        if not pin.specifier.contains(found, prereleases=True):
            return f"{pin.name} is {found}, need {pin.specifier}"
    return None


if __name__ == "__main__":
    reason = problem(sys.argv[1:])
    if reason:
        print(reason)
        sys.exit(1)
