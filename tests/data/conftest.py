"""A tiny corpus and data folders made from it."""

import shutil
from pathlib import Path

import pytest

from megablocks.data.prepare import main


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """40 small source files with tabs, blank runs, non-ASCII and Latin-1 text, an empty file and a binary."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    root = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        path = root / f"package{number % 3}" / f"module{number:02d}.py"
        path.parent.mkdir(exist_ok=True)
        body = "".join(
            f"def function_{number}_{line}(value, scale={line}):\n"
            f"\t# {' '.join(syllables[number * k % 70] + syllables[(line + 9 * k) % 70] for k in range(8))}\n"
            f"\treturn value * scale  +  {number}   # größe ☃ {line}\n\n"
            for line in range(20 + number)
        )
        path.write_text(body, encoding="utf-8")
    (root / "latin.txt").write_bytes("caf\xe9 au lait\n".encode("latin-1") * 20)
    (root / "empty.py").write_bytes(b"")
    (root / "binary.dat").write_bytes(bytes(range(256)) * 4)
    (root / ".hidden").write_text("never read\n")
    return root


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory):
    """A folder made from the corpus; copy it before damaging it."""
    out = tmp_path_factory.mktemp("prepared") / "set"
    assert main(["--input", str(corpus), "--out", str(out), "--vocab-size", "600", "--workers", "1"]) == 0
    return out


@pytest.fixture
def folder(prepared, tmp_path):
    """A private copy of the prepared folder."""
    return Path(shutil.copytree(prepared, tmp_path / "set"))
