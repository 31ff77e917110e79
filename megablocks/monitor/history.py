"""The numbers of a run as CSV files that survive a resume: loss.csv (train and validation) and expert_load.csv.

A history is kept whole in memory (a row a log interval) and written whole, to a temporary file that then takes the
name, so a reader or a crash never sees half a file. Rows later than the iteration that a run resumes from are dropped:
the run that wrote them went beyond its last checkpoint, and this run writes them again.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

LOSS_COLUMNS = (
    "iteration",
    "tokens",
    "train_loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "expert_load_max_over_mean",
    "empty_experts",
    "tokens_dropped",
)
"""tokens: consumed so far. Expert load of the log interval: mean of max/mean over layers, empty experts of all layers.
tokens_dropped: since the first iteration, resumed runs included."""


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write `data` to a temporary neighbour of `path`, flush it to disk and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_log_line(line: str) -> dict[str, float]:
    """Numbers of a Megatron log line ("... iteration 5/ 10 | lm loss: 9.1E+00 | ..."), by name; iteration as such."""
    values: dict[str, float] = {}
    start = re.search(r"\biteration\s+(\d+)", line)
    if start:
        values["iteration"] = float(start.group(1))
    for name, text in re.findall(r"([^|:\]]+):\s*([-+0-9.eE]+|nan|inf|-inf)\s*(?=\||$)", line):
        values[name.strip()] = float(text)
    return values


class History:
    """Rows of floats under fixed columns, keyed by iteration (the first column)."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.rows: dict[int, dict[str, float]] = {}

    def load(self, up_to: int) -> None:
        """Read an earlier run's rows of iterations <= `up_to`. A file with other columns is left out."""
        if not self.path.exists():
            return
        with open(self.path, newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != self.columns:
                return
            for row in reader:
                iteration = int(row[self.columns[0]])
                if iteration <= up_to:
                    self.add(iteration, {name: float(text) for name, text in row.items() if text})

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Set values of `iteration`; columns not named keep what they had. Unknown names are ignored."""
        row = self.rows.setdefault(iteration, {self.columns[0]: iteration})
        row.update({name: value for name, value in values.items() if name in self.columns})

    def series(self, column: str) -> tuple[list[int], list[float]]:
        """Iterations and values where `column` is set, in order."""
        pairs = [(i, row[column]) for i, row in sorted(self.rows.items()) if column in row]
        return [i for i, _ in pairs], [v for _, v in pairs]

    def save(self) -> None:
        """Write the CSV; integers without a point, other values with 7 significant digits as in the log."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for _, row in sorted(self.rows.items()):
            writer.writerow([_format(row[name]) if name in row else "" for name in self.columns])
        write_atomically(self.path, text.getvalue())


def _format(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.7g}"
