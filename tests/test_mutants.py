"""Each patch of tests/mutants still applies, breaks code rather than tests, and has the tests that it must turn red.

Whether they do turn red is shown by scripts/mutants.sh, which takes a run of those tests for each patch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROOFS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
PATCHES = sorted((ROOT / "tests/mutants").glob("*.patch"))


def test_every_proof_has_a_mutant() -> None:
    listed = re.findall(r"^\| ([A-Z]\d+) \|", (ROOT / "tests/PROOFS.md").read_text(), re.M)
    names = [patch.stem for patch in PATCHES]
    assert sorted(listed) == sorted(name for name in names if "-" not in name)
    # another path of a proof is a plain word
    assert [name for name in names if not re.fullmatch(r"([A-Z]\d+)(-[a-z]+)?", name)] == []
    assert {name.split("-")[0] for name in names} == set(listed)


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_mutant_applies_and_has_a_test(patch: Path) -> None:
    done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    touched = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M)
    assert touched and not any(name.startswith("tests/") for name in touched), touched
    proof = f"def test_{patch.stem.split('-')[0]}_"
    assert proof in PROOFS, f"no {proof}"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository with one function, a test of it that is worth its name (X1) and one that is not (X2)."""
    for name in ("scripts/mutants.sh", "scripts/env.sh", "scripts/check_env.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/mutants").mkdir(parents=True)
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests/test_toy.py").write_text(
        "import importlib.util, pathlib\n"
        "path = pathlib.Path(__file__).parents[1] / 'code.py'\n"
        "spec = importlib.util.spec_from_file_location('toy', path)\n"
        "toy = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(toy)\n"
        "def test_X1_doubles(): assert toy.double(3) == 6\n"
        "def test_X2_runs(): assert toy.double(3) is not None\n"
    )
    for name in ("X1", "X2", "X3"):
        (tmp_path / f"tests/mutants/{name}.patch").write_text(
            "--- a/code.py\n+++ b/code.py\n@@ -1,2 +1,2 @@\n def double(x):\n-    return 2 * x\n+    return 3 * x\n"
        )
    (tmp_path / ".venv").symlink_to(tmp_path / "tests")  # no folder, so .gitignore's patterns of folders miss it
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_runner_tells_killed_from_survived(toy: Path) -> None:
    def run(*ids: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable}
        script = ["bash", str(toy / "scripts/mutants.sh"), *ids]
        return subprocess.run(script, env=environment, capture_output=True, text=True)

    killed = run("X1")
    assert killed.returncode == 0 and re.search(r"^X1 +killed ", killed.stdout, re.M), killed.stdout + killed.stderr
    survived = run("X2", "X3")
    assert survived.returncode == 1
    # X3 has no test at all, which proves as little as one that passes.
    assert re.findall(r"^(X\d) +(\w+) ", survived.stdout, re.M) == [("X2", "SURVIVED"), ("X3", "SURVIVED")]
    assert (toy / "code.py").read_text().endswith("return 2 * x\n")
    unknown = run("Y9")
    assert unknown.returncode == 1 and "no patch in tests/mutants for: Y9" in unknown.stderr
