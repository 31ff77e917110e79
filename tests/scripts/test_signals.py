"""A signal to a script that launches experiments: the launch saves and ends, then the script does, in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import SCRIPTS

EXPERIMENT = """
if [ "${DRY_RUN:-0}" = 1 ]; then echo "python -m driver --global-batch-size 4 --data-prefix /data $FLAGS"; exit; fi
mkdir -p "$1"
sleep 30 >/dev/null 2>&1 &
trap 'trap "" TERM INT; kill $! 2>/dev/null; sleep 1; touch "${0%/*}/saved"; exit 0' TERM INT
touch "${0%/*}/started"
wait
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [True, False], ids=["as Ctrl-C", "as kill"])
@pytest.mark.parametrize("name", ["compare_runs", "find_micro_batch", "profile_step"])
def test_a_signal_waits_for_the_launch(name: str, to_group: bool, number: signal.Signals, tmp_path: Path) -> None:
    experiment, out = tmp_path / "exp.sh", tmp_path / "out"
    experiment.write_text(EXPERIMENT)
    words = ["--experiment", str(experiment)] if name == "compare_runs" else ["--", "bash", str(experiment)]
    environment = {name: value for name, value in os.environ.items() if name not in ("DRY_RUN", "FLAGS")}
    child = subprocess.Popen(
        [sys.executable, str(SCRIPTS / f"{name}.py"), str(out), *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    for _ in range(300):
        if (tmp_path / "started").exists():
            break
        time.sleep(0.1)
    (os.killpg if to_group else os.kill)(child.pid, number)
    said, _ = child.communicate(timeout=30)
    said = re.sub(r".*: warning: run_pending_traps: .*\n", "", said)  # of bash, if two signals come at once
    assert (said, child.returncode) == (f"{name}: stopped\n", 130)
    assert (tmp_path / "saved").exists() and not list(out.glob("tmp*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_launch_starts_ends_it_too(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import subprocess, signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import profile_step

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        signal.raise_signal({int(number)})  # before the caller has the process

subprocess.Popen, began = Popen, {str(tmp_path / "pid")!r}
profile_step.launch(["bash", "-c", 'echo $$ >"$0"; exec sleep 60', began])
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "-c: stopped\n") and time.monotonic() - began < 50
