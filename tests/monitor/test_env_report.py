"""The environment report holds what a bug report needs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megablocks
from megablocks.monitor import env_report as env_report_module
from megablocks.monitor.env_report import commit, env_report


def test_report_names_command_commit_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["torchrun", "-m", "a b"])
    report = dict(line.split(": ", 1) for line in env_report().splitlines() if ": " in line)
    assert report["command"] == "torchrun -m 'a b'"
    assert report["commit"] == commit() and len(commit().split("+")[0]) in (7, 40)
    assert report["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert report["apex"] == "not installed" or report["apex"][0].isdigit()
    assert "torch" in report and "megatron-core" in report


def test_the_commit_of_a_copy_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABLOCKS_COMMIT", "0123abc")
    assert commit() == "0123abc" and "commit: 0123abc" in env_report().splitlines()


def test_the_commit_of_a_project_around_the_package_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGABLOCKS_COMMIT", raising=False)
    installed = tmp_path / "site-packages"
    shutil.copytree(Path(megablocks.__file__).parent / "monitor", installed)
    for words in ("init -q", "-c user.name=a -c user.email=a commit -q --allow-empty -m a"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    monkeypatch.setattr(env_report_module, "__file__", str(installed / "env_report.py"))
    assert commit() == "unknown"
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    assert len(commit().split("+")[0]) == 40


def test_report_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "megablocks.monitor.env_report"], capture_output=True, text=True)
    assert done.returncode == 0 and "-m megablocks.monitor.env_report" in done.stdout.splitlines()[0]
