"""Log lines, CSV files and plots."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megablocks.config import ConfigError
from megablocks.files import write_durably
from megablocks.monitor.expert_load import LoadSummary
from megablocks.monitor.history import LOSS_COLUMNS, History, parse_log_line
from megablocks.monitor.plots import plot_expert_load, plot_loss, plot_parts, plot_runs

LINE = (
    " [2026-11-20 17:11:21.528473] iteration       12/      60 | consumed samples:            8 | elapsed time per "
    "iteration (ms): 54.4 | learning rate: 8.333334E-03 | lm loss: 6.229799E+00 | grad norm: nan | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_every_number_of_a_log_line_is_read() -> None:
    values = parse_log_line(LINE)
    assert values["iteration"] == 12 and values["lm loss"] == 6.229799 and values["learning rate"] == 8.333334e-3
    assert values["elapsed time per iteration (ms)"] == 54.4
    assert values["number of skipped iterations"] == 0 and values["grad norm"] != values["grad norm"]
    validation = parse_log_line(" validation loss at iteration 60 | lm loss value: 4.5E+00 | lm loss PPL: 9.0E+01 | ")
    assert validation["lm loss value"] == 4.5 and validation["iteration"] == 60


def test_a_loss_that_is_not_finite_is_read() -> None:
    """Python prints NAN and INF in the format of Megatron's losses, nan and inf in that of its norms."""
    values = parse_log_line(f" iteration 5/ 10 | lm loss: {math.inf:.6E} | lm loss value: {math.nan:.6E} | ")
    assert values["lm loss"] == math.inf and math.isnan(values["lm loss value"])


def test_what_is_no_number_is_left_out() -> None:
    assert parse_log_line(" torch: 2.11.0") == parse_log_line("time left: - | ") == {}


def test_history_survives_a_resume_and_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    first = History(tmp_path)
    for iteration in (1, 2, 3, 4):
        first.add(iteration, {"train_loss": 1 / iteration, "tokens": 256 * iteration, "unknown": 5.0})
    first.add(2, {"validation_loss": 0.75})
    first.save()
    again = History(tmp_path)
    again.load(up_to=3)
    assert again.series("train_loss") == ([1, 2, 3], [1.0, 0.5, pytest.approx(1 / 3, rel=1e-6)])
    assert again.series("validation_loss") == ([2], [0.75])
    again.add(4, {"train_loss": 0.2})
    again.save()
    text = (tmp_path / "loss.csv").read_text().splitlines()
    assert text[0] == ",".join(LOSS_COLUMNS) and text[4].startswith("4,,0.2,") and len(text) == 5


def test_a_csv_with_other_columns_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("step,loss\n1,2\n")
    history = History(tmp_path)
    history.load(up_to=10)
    assert not history.rows


def test_the_file_of_an_earlier_run_is_set_aside_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "loss.csv").write_text(f"step,loss\n1,{number}\n")
        history = History(tmp_path)
        history.load(up_to=0)
        kept = history.set_aside()
        assert kept == tmp_path / f"loss-{number}.csv" and kept.read_text() == f"step,loss\n1,{number}\n"
    history.add(1, {"train_loss": 2.0})
    history.save()
    again = History(tmp_path)
    again.load(up_to=1)
    assert again.set_aside() is None and History(tmp_path / "new").set_aside() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss-1.csv", "loss-2.csv", "loss.csv"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loss.csv"
    write_durably(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_load_summary_equals_a_hand_count() -> None:
    table = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 9], [2, 2, 2, 5]])
    summary = LoadSummary.from_table(table, layers=[1, 3])
    assert summary.tokens.tolist() == [[3, 1, 0], [2, 2, 2]] and summary.dropped.tolist() == [0, 5]
    assert summary.max_over_mean.tolist() == [pytest.approx(2.25), 1.0]
    assert summary.empty.tolist() == [1, 0]
    assert str(summary) == " expert load max/mean: 2.25/1.00 | empty experts: 1/0 | tokens dropped: 5 |"


def test_plots_are_drawn_with_and_without_validation_and_entropy(tmp_path: Path) -> None:
    history = History(tmp_path)
    for iteration in range(1, 6):
        history.add(iteration, {"train_loss": 6 / iteration})
    plot_loss(history, tmp_path / "bare.png")
    history.add(5, {"validation_loss": 1.5})
    plot_loss(history, tmp_path / "loss.png", unigram_entropy=5.5)
    plot_expert_load([[0, 0, 0], [4, 1, 1]], tmp_path / "load.png", title="load", layers=[2, 4])
    for name in ("bare.png", "loss.png", "load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bare.png").read_bytes() != (tmp_path / "loss.png").read_bytes()


@pytest.mark.parametrize("row", ["2,x,,,,,,,,,", "two,1,,,,,,,,,", "2,1,,,,,,,,,,7", "2,1.5e"])
def test_a_row_that_holds_no_numbers_is_named(row: str, tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("\n".join([",".join(LOSS_COLUMNS), "1,1,,,,,,,,,", row, ""]))
    with pytest.raises(ConfigError, match=r"loss.csv: line 3 is no row of numbers; mend or remove it"):
        History.of_run(tmp_path)


def test_a_title_may_hold_dollars(tmp_path: Path) -> None:
    """matplotlib takes what stands between two for mathematics, and fails."""
    history = History(tmp_path)
    history.add(1, {"train_loss": 2.0})
    plot_runs({"a": history, "b": history}, tmp_path / "runs.png", title="a$^$")
    plot_expert_load([[1, 2]], tmp_path / "load.png", title="a$^$", layers=[0])
    plot_parts([("experts", 1.0, 0.5, 0.5)], tmp_path / "parts.png", title="a$^$")


@pytest.mark.parametrize(
    "rows", [b"1,256\n\xff\xfe,512\n", b"1,256\n2x,512\n", b"1,256\n\0\0\0\0,\0\n", b"1,many\n", b",256\n"]
)
def test_a_damaged_file_is_set_aside_whole(tmp_path: Path, rows: bytes) -> None:
    content = ",".join(LOSS_COLUMNS).encode() + b"\n" + rows
    (tmp_path / "loss.csv").write_bytes(content)
    history = History(tmp_path)
    history.load(up_to=9)
    assert not history.rows
    kept = history.set_aside()
    assert kept is not None and kept.read_bytes() == content
