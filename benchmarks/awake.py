"""Keep the cores awake while the host's time is measured.

A core without work halts, and a virtual machine's is then given away, so that a thread which waits for another, as a
step does for autograd's, is woken late. That is the host's doing and not the layer's: with something to do for every
core, none halts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
"""Ends by itself, some milliseconds after its parent, whatever ended that."""


@contextlib.contextmanager
def cores_awake(wanted: bool) -> Iterator[None]:
    """A busy loop on each core that this process may use, if `wanted`; it runs only when nothing else does there.

    The loops are processes of their own, of the priority SCHED_IDLE, and end with this one. A quota of processor time,
    as a container may have, counts theirs as well: there they would slow what is measured.

    Raises:
        SystemExit: the platform has no SCHED_IDLE, or does not let it be set.
    """
    script = Path(sys.argv[0]).name
    if wanted and not hasattr(os, "SCHED_IDLE"):
        raise SystemExit(f"{script}: --awake needs SCHED_IDLE, which {sys.platform} does not have; run without it")
    command = [sys.executable, "-I", "-S", "-c", LOOP, str(os.getpid())]
    with contextlib.ExitStack() as loops:
        for core in sorted(os.sched_getaffinity(0)) if wanted else ():
            # Quiet, since Ctrl-C reaches it too. A session of its own might get a share of the core of its own.
            loop = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            loops.callback(loop.wait)
            loops.callback(loop.kill)
            try:
                os.sched_setscheduler(loop.pid, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(loop.pid, {core})
            except OSError as e:
                raise SystemExit(f"{script}: --awake cannot set a loop's priority or core ({e}); run without it") from e
        yield
