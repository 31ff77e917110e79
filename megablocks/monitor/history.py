"""The losses and rates of a run, as a CSV file that survives a resume.

A history is complete in memory, with one row per log interval. It is written to a temporary file that is then renamed,
so neither a reader nor a crash sees half a file. A resumed run drops the rows after the iteration of its checkpoint
and writes them again. A new run keeps the file of an earlier run under another name.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from megablocks.config import ConfigError
from megablocks.files import write_durably

LOSS_COLUMNS = (
    "iteration", "tokens", "train_loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu",
    "expert_load_max_over_mean", "empty_experts", "tokens_dropped",
)  # fmt: skip
"""tokens: consumed so far. expert_load_max_over_mean: in the log interval, mean over the layers. empty_experts: in the
log interval, sum over the layers. tokens_dropped: since the first iteration, also across resumes."""


def parse_log_line(line: str) -> dict[str, float]:
    """Numbers of a Megatron log line ("... iteration 5/ 10 | lm loss: 9.1E+00 | ..."), by name."""
    values: dict[str, float] = {}
    start = re.search(r"\biteration\s+(\d+)", line)
    if start:
        values["iteration"] = float(start.group(1))
    for name, text in re.findall(r"([^|:\]]+):\s*([^\s|]+)\s*(?=\||$)", line):
        with contextlib.suppress(ValueError):  # text that is not a number
            values[name.strip()] = float(text)
    return values


class History:
    """`loss.csv` in the folder of a run: floats in LOSS_COLUMNS, with one row per iteration."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "loss.csv"
        self.rows: dict[int, dict[str, float]] = {}

    @classmethod
    def of_run(cls, folder: Path) -> History:
        """All rows of an earlier run. Raises ConfigError for a row that holds anything but numbers."""
        history = cls(folder)
        history.rows = history._read()
        return history

    def load(self, up_to: int) -> None:
        """Read the rows of an earlier run with iteration <= `up_to`. Ignores a damaged file and other columns."""
        with contextlib.suppress(ConfigError):
            self.rows |= {iteration: row for iteration, row in self._read().items() if iteration <= up_to}

    def _read(self) -> dict[int, dict[str, float]]:
        if not self.path.exists():
            return {}
        with open(self.path, newline="") as file:
            reader = csv.DictReader(file)
            try:
                if tuple(reader.fieldnames or ()) != LOSS_COLUMNS:
                    return {}
                return {
                    int(row["iteration"]): {name: float(text) for name, text in row.items() if text} for row in reader
                }
            except (TypeError, ValueError, csv.Error):  # not a number, too many values for the columns, or not text
                where = f"{self.path}: line {max(1, reader.line_num)}"
                raise ConfigError(f"{where} is no row of numbers; mend or remove it") from None

    def set_aside(self) -> Path | None:
        """Rename a file from which nothing was loaded: `save` would replace it. Returns the new name, if any."""
        if self.rows or not self.path.exists():
            return None
        names = (self.path.with_name(f"loss-{number}.csv") for number in itertools.count(1))
        return self.path.rename(next(name for name in names if not name.exists()))

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Set values of `iteration`. Other columns of the row keep their values. Unknown names are ignored."""
        row = self.rows.setdefault(iteration, {"iteration": iteration})
        row.update({name: value for name, value in values.items() if name in LOSS_COLUMNS})

    def series(self, column: str) -> tuple[list[int], list[float]]:
        """The iterations at which `column` has a value, in order, and these values."""
        pairs = [(i, row[column]) for i, row in sorted(self.rows.items()) if column in row]
        return [i for i, _ in pairs], [v for _, v in pairs]

    def save(self) -> None:
        """Write the CSV file. Integers have no decimal point, other values 7 significant digits, as in the log."""
        lines = [",".join(LOSS_COLUMNS)]
        for _, row in sorted(self.rows.items()):
            lines.append(",".join(_format(row[name]) if name in row else "" for name in LOSS_COLUMNS))
        write_durably(self.path, "\n".join(lines) + "\n")


def _format(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.7g}"
