"""The largest micro-batch of an experiment that fits into memory, found by trials of three steps.

    python scripts/find_micro_batch.py OUT -- bash exp/dmoe/dmoe_125m_8gpu.sh [STEPS …]

A trial launches a script of exp/ with one of the sizes that divide each data-parallel rank's share of the global batch.
The first trial takes the whole share. If it runs out of memory, each further trial halves the sizes that are left.
If torch's allocator emptied its cache in the last step to find room, for which it waits for the GPU, the size counts as
too large, unless no smaller size has more room.
Writes OUT/micro_batch.json: the chosen size, and the peak memory and tokens/s of each trial; the logs are next to it.
With expert parallelism the memory depends on the load of the experts; use the next smaller size there. The environment
variables are those of exp/common.sh; DRY_RUN=1 prints the trials.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profile_step import EXAMPLE, command_in, launch

from megablocks.config import ConfigError, is_dry_run
from megablocks.files import write_durably
from megablocks.monitor.history import parse_log_line
from megablocks.tool.commands import named_path, print_in_any_locale

FLAGS = "--train-iters 3 --log-interval 1 --eval-iters 0 --no-save-optim --no-save-rng --micro-batch-size"
_OUT_OF_MEMORY = re.compile(r"^pretrain_gpt: .*(out of memory|ALLOC_FAILED)", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """One launch. Peak and speed are None if it did not fit, or if its log lacks them.

    retries: how often the allocator emptied its cache in the last step.
    """

    micro_batch_size: int
    fits: bool
    peak_memory_gib: float | None = None
    tokens_per_second: float | None = None
    retries: int = 0

    @property
    def has_room(self) -> bool:
        return self.fits and not self.retries


def divisors(share: int) -> list[int]:
    """The sizes that divide a rank's share of the global batch, ascending."""
    return [size for size in range(1, share + 1) if share % size == 0]


def share_of(command: Sequence[str]) -> int:
    """Sequences of a step on one data-parallel rank, from the launcher's command. If a flag repeats, the last counts.

    Raises:
        ConfigError: the ranks do not divide the global batch, or the command has no global batch.
    """
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    values = {flag: following for flag, following in zip(words, words[1:], strict=False) if flag.startswith("--")}

    def value(flag: str) -> int:
        text = values.get(flag, "1")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{flag} {text}: must be a whole number >= 1")
        return int(text)

    if "--global-batch-size" not in values:
        raise ConfigError("--global-batch-size is missing in the launch; give it in FLAGS")
    batch, ranks = value("--global-batch-size"), value("--nnodes") * value("--nproc-per-node")
    model = 1
    for name in ("tensor-model", "pipeline-model", "context"):
        model *= value(f"--{name}-parallel-size")
    if ranks % model or batch % (ranks // model):
        raise ConfigError(
            f"--global-batch-size {batch}: must be a multiple of the data-parallel ranks, {ranks}/{model}"
        )
    return batch // (ranks // model)


def largest_that_fits(sizes: Sequence[int], attempt: Callable[[int], Trial]) -> list[Trial]:
    """The trials, in order: the largest size, then bisection, because a smaller size never needs more memory."""
    trials = [attempt(sizes[-1])]
    low, high = -1, len(sizes) - 1  # `low` has room, `high` has not
    if trials[0].has_room:
        return trials
    while high - low > 1:
        middle = (low + high) // 2
        trials.append(attempt(sizes[middle]))
        low, high = (middle, high) if trials[-1].has_room else (low, middle)
    return trials


def read_log(size: int, status: int, text: str) -> Trial:
    """The trial that a log describes. Raises ConfigError if it failed for another reason than memory."""
    if status:
        if not _OUT_OF_MEMORY.search(text):
            said = re.findall(r"^pretrain_gpt: .*", text, re.MULTILINE)
            raise ConfigError(f"micro-batch {size}: {said[-1] if said else f'the launch ended with {status}'}")
        return Trial(size, False)
    peaks = [float(mib) for mib in re.findall(r"max allocated: ([\d.]+)", text)]
    steps = [step for line in text.splitlines() if "tokens/s" in (step := parse_log_line(line))]
    last = steps[-1] if steps else {}
    peak = max(peaks) / 1024 if peaks else None
    return Trial(size, True, peak, last.get("tokens/s"), int(last.get("allocator retries", 0)))


def _trial(out: Path, words: Sequence[str], size: int) -> Trial:
    """Launch a trial in a folder that is then removed. Its log stays as OUT/micro_batch_SIZE.log."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        status = launch(command_in(Path(folder), words), FLAGS=_flags(size))
        log, kept = Path(folder) / "train.log", out / f"micro_batch_{size}.log"
        if not log.exists():
            raise ConfigError(f"micro-batch {size}: the launch ended with {status} before training")
        shutil.copyfile(log, kept)
    return read_log(size, status, kept.read_text(errors="replace"))


def _flags(size: int) -> str:
    return f"{os.environ.get('FLAGS', '')} {FLAGS} {size}".strip()


def _printed(out: Path, words: Sequence[str]) -> list[str]:
    """The driver's command that the script would run."""
    environment = {**os.environ, "DRY_RUN": "1"}
    done = subprocess.run(command_in(out / "trial", words), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"command={shlex.join(words)!r}: {' '.join(done.stderr.split()) or done.returncode}")
    return shlex.split(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: found. 1: not even a micro-batch of 1 fits. 2: bad arguments, or a trial that failed otherwise."""
    print_in_any_locale()
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="find_micro_batch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=named_path, help="folder for micro_batch.json and the logs")
    parser.add_argument("--size", type=int, help="try only this size")
    options, command = parser.parse_args(words[:cut]), words[cut + 1 :]
    out: Path = options.out
    try:
        if not command:
            raise ConfigError(f"command is missing: give a script of exp/ after --, such as {EXAMPLE}")
        sizes = divisors(share := share_of(_printed(out, command)))
        if options.size is not None and options.size not in sizes:
            raise ConfigError(f"--size {options.size}: must divide {share}, a rank's share of --global-batch-size")
        sizes = sizes if options.size is None else [options.size]
        if is_dry_run():
            for size in reversed(sizes):
                print(f"FLAGS={shlex.quote(_flags(size))} {shlex.join(command_in(out / 'trial', command))}")
            return 0
        trials = largest_that_fits(sizes, lambda size: _trial(out, command, size))
    except ConfigError as error:
        print(f"find_micro_batch: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"find_micro_batch: {error.filename or out}: {error.strerror}; choose another folder", file=sys.stderr)
        return 2
    fitting = [trial for trial in trials if trial.fits]
    chosen = max(fitting, key=lambda trial: (trial.has_room, trial.micro_batch_size), default=None)
    found = {"micro_batch_size": chosen and chosen.micro_batch_size, "trials": [asdict(trial) for trial in trials]}
    write_durably(out / "micro_batch.json", json.dumps(found, indent=1) + "\n")
    if chosen is None:
        print(f"find_micro_batch: not even --micro-batch-size {sizes[0]} fits; spread the model or recompute",
              file=sys.stderr)  # fmt: skip
        return 1
    peak = "" if chosen.peak_memory_gib is None else f", peak memory {chosen.peak_memory_gib:.1f} GiB"
    print(f"--micro-batch-size {chosen.micro_batch_size} fits{peak}; add it to FLAGS ({out}/micro_batch.json)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
