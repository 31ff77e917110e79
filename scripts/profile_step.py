"""A training step as a table of parts, from a trace of torch's profiler, with the bound of each part.

    python scripts/profile_step.py OUT -- bash exp/dmoe/dmoe_125m_8gpu.sh [STEPS …]
    python scripts/profile_step.py OUT --trace RUN/torch_profile/rank-0.json.gz

The first form launches a script of exp/ in the folder OUT/run for a few steps; the script's arguments are those after
EXP_DIR, and the environment variables are those of exp/common.sh. Writes OUT/profile.md, profile.json and profile.png.
The times of the parts add up to the step: while kernels overlap, the time belongs to the one that started last, and to
communication only if nothing else runs. The profiler slows the host, so the table has more idle time than the steps
after the profile, which the line above the table describes. DRY_RUN=1 prints the command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megablocks.config import ConfigError, is_dry_run
from megablocks.monitor.bounds import RunSizes
from megablocks.monitor.profile_step import profile_of, write
from megablocks.monitor.trace import read_step
from megablocks.tool.commands import named_path, print_in_any_locale

FIRST, LAST, STEPS, INTERVAL = 6, 9, 15, 5
"""The profiled steps, FIRST to LAST - 1, the steps of a run, and its log interval. No profiled step is logged, since
the guard then reads all gradients. The tokens/s are those of the last interval."""
FLAGS = (
    f"--train-iters {STEPS} --log-interval {INTERVAL} --eval-iters 0 --no-save-optim --no-save-rng --profile "
    f"--use-pytorch-profiler --profile-step-start {FIRST} --profile-step-end {LAST} --profile-ranks 0"
)
EXAMPLE = "-- bash exp/dmoe/dmoe_125m_8gpu.sh"


def command_in(folder: Path, words: Sequence[str]) -> list[str]:
    """The command with `folder` as the first argument of its script. Raises ConfigError if there is no script."""
    at = next((i for i, word in enumerate(words) if word.endswith(".sh")), None)
    if at is None or not Path(words[at]).is_file():
        raise ConfigError(f"command={shlex.join(words)!r}: must name a script of exp/, such as {EXAMPLE}")
    return [*words[: at + 1], str(folder), *words[at + 1 :]]


def launch(command: Sequence[str], **variables: str) -> int:
    """Run a script of exp/. Returns its exit status.

    A signal goes to the script too, which saves and ends; then this program ends with 130.
    """
    child: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if child is not None:
            child.send_signal(signal.SIGTERM)  # of Ctrl-C its second signal, which it does not count

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, stop) for number in numbers]
    child = subprocess.Popen(command, env={**os.environ, **variables})
    if stopped:  # while the script started
        child.send_signal(signal.SIGTERM)
    status = child.wait()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    if stopped:
        print(f"{Path(sys.argv[0]).stem}: stopped", file=sys.stderr)
        sys.exit(130)
    return status


def _launch(out: Path, words: Sequence[str]) -> Path | None:
    """Run the experiment in OUT/run. Returns its trace; None with DRY_RUN=1, which only prints the command."""
    folder = out / "run"
    command, flags = command_in(folder, words), f"{FLAGS} {os.environ.get('FLAGS', '')}".strip()
    if is_dry_run():
        print(f"FLAGS={shlex.quote(flags)} {shlex.join(command)}")
        return None
    if folder.is_dir() and any(folder.iterdir()):  # it saved no optimizer, so it cannot resume
        raise ConfigError(f"{folder}: holds an earlier run: remove it or choose another out")
    if status := launch(command, FLAGS=flags):
        log = folder / "train.log"
        see = f"see {log}" if log.exists() else "the line above says why"
        raise ConfigError(f"command={shlex.join(command)!r}: ended with {status}; {see}")
    return folder / "torch_profile" / "rank-0.json.gz"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: written. 2: bad arguments, a run that failed, or a trace that cannot be read."""
    print_in_any_locale()
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    words, command = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="profile_step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=named_path, help="folder for the table and the picture")
    parser.add_argument("--trace", type=named_path, help="read this trace instead of launching a run")
    parser.add_argument("--run", type=named_path, help="sizes of the run (default: run.json next to the trace)")
    parser.add_argument("--title", help="title of table and picture (default: the script's or the trace's name)")
    options = parser.parse_args(words)
    try:
        if (options.trace is None) == (not command):
            raise ConfigError(f"trace={options.trace}: give either --trace FILE or a command after --: {EXAMPLE}")
        trace = options.trace or _launch(options.out, command)
        if trace is None:
            return 0
        sizes = options.run or trace.with_name("run.json")
        run = RunSizes.read(sizes) if options.run or sizes.exists() else None
        script = next((Path(word).stem for word in command if word.endswith(".sh")), None)
        title = options.title or script or trace.name.split(".")[0]
        print(write(profile_of(read_step(trace), run), options.out, title), end="")
        if run is None:
            print(f"no bounds: {sizes} does not exist; give --run FILE")
    except (ConfigError, OSError) as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
