"""Fixtures that tests/megatron and tests/reliability share: one zygote and one tiny data set for a session."""

from __future__ import annotations

import atexit
import functools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from driver import ROOT, Driver, Zygote

WORDS = "the cat dog runs over lazy fox quick brown jumps and then sleeps in a warm house near river bank".split()


@functools.cache
def _zygote() -> Zygote:
    process = Zygote()
    atexit.register(process.close)
    return process


@functools.cache
def _tiny_data(folder: Path) -> Path:
    (folder / "text").mkdir()
    for index in range(8):
        rng = random.Random(index)
        lines = (" ".join(rng.choice(WORDS) for _ in range(12)) + "." for _ in range(300))
        (folder / "text" / f"{index}.txt").write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--out", str(folder / "prepared")]
    command += ["--input", str(folder / "text"), "--vocab-size", "400", "--valid-fraction", "0.25", "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "prepared"


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    return _zygote()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of twenty words in random order: a prepared folder with a vocabulary of 400."""
    folder = tmp_path_factory.getbasetemp() / "tiny_data"
    folder.mkdir(exist_ok=True)
    return _tiny_data(folder)


@pytest.fixture
def driver(zygote: Zygote, tiny_data: Path, tmp_path: Path) -> Driver:
    """Launches runs of the driver; their logs lie in the test's folder."""
    return Driver(zygote, tiny_data, tmp_path)
