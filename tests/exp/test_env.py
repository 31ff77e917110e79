"""L3: scripts/env.sh finds or makes an environment, or says in one line what to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "cat", "env", "mkdir", "chmod")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout's launch files and a PATH without any Python or uv: `bare/bin`."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "scripts/check_env.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    return tmp_path


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def _bash(root: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": str(root / "bin"), "HOME": str(root), **environment}
    code = f"source scripts/env.sh; {command}"
    return subprocess.run(["bash", "-c", code], cwd=root, env=variables, capture_output=True, text=True)


USE = 'use_env megatron || exit 1; echo "PYTHON=$PYTHON"'


def test_L3_no_python_and_no_uv_says_what_to_install(bare: Path) -> None:
    done = _bash(bare, USE)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no Python >= 3.12" in done.stderr and "pyenv install 3.12" in done.stderr


def test_L3_the_active_python_is_taken_when_it_fits(bare: Path) -> None:
    _script(bare / "bin/python3", f'exec "{sys.executable}" "$@"\n')
    done = _bash(bare, USE)
    assert done.stdout == f"PYTHON={bare}/bin/python3\n", done.stderr
    assert done.stderr == "" and not (bare / ".venv").exists()


def test_L3_a_named_python_that_does_not_fit_is_refused_with_the_missing_pin(bare: Path) -> None:
    pyproject = bare / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("megatron-core==0.19.2", "megatron-core==0.0.1"))
    done = _bash(bare, USE, PYTHON=sys.executable)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "megatron-core is 0.19.2, need ==0.0.1; install it there" in done.stderr


def test_L3_a_missing_package_is_named(bare: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", bare / "scripts/check_env.py", "megatron"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "packaging is not installed\n")
    pyproject = bare / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"six>=1.16"', '"no-such-package>=1"'))
    done = subprocess.run([sys.executable, bare / "scripts/check_env.py", "megatron"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "no-such-package is not installed\n")


def test_L3_a_python_that_is_too_old_is_never_used(bare: Path) -> None:
    # Fails every assertion about its version, as a 3.11 would; only uv is left.
    _script(bare / "bin/python3", "exit 1\n")
    _script(bare / "bin/uv", f'echo "$@" >> "{bare}/uv.log"; exit 1\n')
    done = _bash(bare, USE)
    assert done.returncode == 1
    assert (bare / "uv.log").read_text() == f"venv --quiet --allow-existing --seed --python 3.12 {bare}/.venv\n"


def test_L3_a_python_in_pyenv_is_found_when_the_path_has_none(bare: Path) -> None:
    _script(bare / ".pyenv/versions/3.11.7/bin/python", "exit 1\n")
    _script(bare / ".pyenv/versions/3.12.1/bin/python", f'exec "{sys.executable}" "$@"\n')
    done = _bash(bare, "_base_python")
    assert done.returncode == 0
    assert os.path.realpath(done.stdout.strip()) == os.path.realpath(sys.executable)


def test_L3_an_environment_is_made_with_the_extras_and_a_failed_install_says_so(bare: Path) -> None:
    stub = f'echo "$@" >> "{bare}/pip.log"\ncase "$*" in *pip*) exit 1;; esac\n'
    copy = f'mkdir -p "$3/bin"; cat "{bare}/stub" > "$3/bin/python"; chmod +x "$3/bin/python"'
    made = f'if [ "$1" = -m ] && [ "$2" = venv ]; then {copy}; fi\n'
    _script(bare / "stub", stub)
    _script(bare / "bin/python3.12", f'case "$1" in -c) echo "{bare}/bin/python3.12";; esac\n' + made)
    done = _bash(bare, "use_env megatron dev")
    assert done.returncode == 1
    assert f"making {bare}/.venv with {bare}/bin/python3.12" in done.stderr
    assert "installing megablocks[megatron,dev]" in done.stderr
    assert f"pip could not install megablocks[megatron,dev] into {bare}/.venv" in done.stderr
    assert f"-c {bare}/scripts/constraints.txt -e {bare}[megatron,dev]" in (bare / "pip.log").read_text()


def test_L3_an_environment_that_lacks_an_extra_is_completed_not_remade(bare: Path) -> None:
    # Its Python and pip work, only the pins do not hold yet; nothing else on the machine could make a new one.
    pip = f'echo "$@" >> "{bare}/pip.log"; exit 1'
    _script(bare / ".venv/bin/python", f'case "$*" in *check_env*) exit 1;; *" pip "*) {pip};; esac\n')
    done = _bash(bare, "use_env megatron dev")
    assert done.returncode == 1 and f"completing {bare}/.venv" in done.stderr
    log = (bare / "pip.log").read_text()
    assert f"-c {bare}/scripts/constraints.txt -e {bare}[megatron,dev]" in log


@pytest.mark.parametrize("index", ["global.index-url='https://host'", ":env:.extra-index-url='file:///wheels'", ""])
def test_L3_uv_installs_unless_pip_has_an_index_of_its_own(bare: Path, index: str) -> None:
    log = f'case "$*" in *"config list") echo "{index}";; *check_env*) exit 1;; *) echo "$@" >> "{bare}/log";; esac\n'
    _script(bare / ".venv/bin/python", log)
    _bash(bare, "use_env megatron")
    commands = [" ".join(line.split()[1:3]) for line in (bare / "log").read_text().splitlines() if "install" in line]
    assert commands == (["pip install"] if ".index-url" in index else ["pip install", "uv pip"])


PLAIN = ("docker.sh", "scripts/compile_releases.sh", "scripts/release_check.sh", "scripts/site.sh", "scripts/test.sh")


@pytest.mark.parametrize("script", PLAIN)
@pytest.mark.parametrize("value", ["true", "2", " 1"])
def test_another_value_of_dry_run_is_refused(script: str, value: str, tmp_path: Path) -> None:
    """With nothing on PATH but these tools, so that a script that goes on does nothing."""
    for tool in (*TOOLS, "basename", "nproc", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    environment = {"PATH": str(tmp_path), "DRY_RUN": value}
    done = subprocess.run(["bash", ROOT / script], env=environment, capture_output=True, text=True)
    expected = f"{Path(script).name}: DRY_RUN={value}: must be 0 or 1\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_one_function_reads_dry_run() -> None:
    listed = subprocess.run(["git", "ls-files", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    reading = [name for name in listed.stdout.split() if re.search(r"\$\{?DRY_RUN", (ROOT / name).read_text())]
    assert reading == ["scripts/env.sh"]


@pytest.mark.parametrize(("tests", "compiling", "expected"), [(0, 0, 0), (5, 0, 1), (0, 6, 1)])
def test_ci_passes_exactly_when_the_tests_and_the_other_releases_do(
    tmp_path: Path, tests: int, compiling: int, expected: int
) -> None:
    _script(tmp_path / ".ci/run", (ROOT / ".ci/run").read_text())
    _script(tmp_path / "scripts/env.sh", "use_env() { PYTHON=python3; }\n")
    _script(tmp_path / "scripts/test.sh", f"sleep 0.2; exit {tests}\n")
    _script(tmp_path / "scripts/compile_releases.sh", f"echo compiled; exit {compiling}\n")
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (expected, "")
    assert done.stdout == ("compiled\n" if compiling else "")
