"""The environment report holds what a bug report needs."""

import subprocess
import sys

import pytest

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


def test_report_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "megablocks.monitor.env_report"], capture_output=True, text=True)
    assert done.returncode == 0 and "-m megablocks.monitor.env_report" in done.stdout.splitlines()[0]
