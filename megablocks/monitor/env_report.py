"""Versions, devices, commit and command of a run, for env.txt in the run folder and for bug reports.

`python -m megablocks.monitor.env_report` prints them. It works without torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "megablocks", "torch", "triton", "megatron-core", "transformer-engine", "apex", "tutel", "numpy", "sentencepiece",
    "transformers", "tensorboard", "wandb",
)  # fmt: skip
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def version(package: str) -> str:
    """The version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit of the git checkout that holds this package, or "unknown". "+changes": tracked files were modified.

    For a copy outside git, MEGABLOCKS_COMMIT can name the commit.
    """
    if given := os.environ.get("MEGABLOCKS_COMMIT"):
        return given
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    # An installed package can be inside the checkout of a user's project, whose commit says nothing about the package.
    is_tracked = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    try:
        for command in (is_tracked, describe):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if done.returncode:
                return "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip()


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability and GiB of each visible GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "gib": round(p.total_memory / 2**30, 1)} for p in every
    ]


def env_report() -> str:
    """A text of `name: value` lines. The first line has the command of this process."""
    lines = [f"command: {shlex.join(sys.orig_argv)}", f"folder: {os.getcwd()}", f"commit: {commit()}"]
    lines.append(f"python: {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    lines += [f"{package}: {version(package)}" for package in PACKAGES]
    with contextlib.suppress(ImportError):
        import torch

        lines.append(f"torch CUDA: {torch.version.cuda or 'none'}")
        lines += [f"GPU {i}: {gpu['name']}, {gpu['gib']:.0f} GiB" for i, gpu in enumerate(gpus())]
    lines += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(env_report())
