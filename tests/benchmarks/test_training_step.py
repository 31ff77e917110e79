"""training_step.py reads a run's log, and its gate is red where arms of one model train differently."""

import importlib
from pathlib import Path

import pytest

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

measure = importlib.import_module("measure")
step = importlib.import_module("training_step")


def log(ms: float, loss: float, last: int = 30) -> str:
    lines = ["[Rank 0] (after 5 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 4096.0"]
    for iteration in (1, *range(5, last + 1, 5)):
        slow = 1000.0 if iteration <= 15 else 0.0
        lines.append(
            f" [2026-01-01] iteration {iteration:8d}/ 30 | elapsed time per iteration (ms): {ms + slow} | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | tokens/s: {int(131072e3 / (ms + slow))} | MFU: 30.0% |"
        )
    return "\n".join(lines)


def test_a_log_is_read_without_its_first_steps() -> None:
    one = step.read_log(log(250.0, 6.5))
    assert (one.ms, one.mfu, one.peak_gib, one.first_s, one.loss) == (250.0, 0.3, 2.0, 1.25, 6.5)
    assert one.tokens_per_second == 524288


def test_half_of_the_steps_do_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.read_log(log(250.0, 6.5, last=15), steps=15).ms == 1250.0  # its last interval alone
    assert step.read_log(log(250.0, 6.5, last=20), steps=20).ms == 750.0  # the mean of two
    with pytest.raises(ValueError, match="ended early"):
        step.read_log(log(250.0, 6.5, last=15))
    monkeypatch.setattr("sys.argv", ["x", "--steps", "12"])
    with pytest.raises(SystemExit):
        step.main()
    assert "--steps is 12, but must be a multiple of 5 and at least 10" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", log(250.0, 6.5, last=25)])
def test_a_run_that_ended_early_is_no_figure(text: str) -> None:
    with pytest.raises(ValueError, match="ended early"):
        step.read_log(text)


def test_the_gate_compares_the_losses_of_one_model() -> None:
    arms = {"a": step.Arm("M", "x.sh", ""), "b": step.Arm("M", "x.sh", ""), "c": step.Arm("N", "y.sh", "")}
    for other, green in ((6.6, True), (6.7, False)):
        runs = {name: [step.read_log(log(250.0, loss))] for name, loss in (("a", 6.5), ("b", other), ("c", 9.0))}
        gate = measure.Gate(ours=lambda _: True)
        rows = step.summarize(runs, arms, gate)
        assert gate.green == green and [row["arm"] for row in rows] == ["a", "b", "c"]


def test_every_arm_names_a_script() -> None:
    root = Path(step.ROOT)
    assert all((root / "exp" / arm.script).is_file() for arm in (*step.ARMS.values(), *step.BEFORE.values()))
    assert step.command_of(step.ARMS["dmoe-xs"], root, Path("/d"), Path("/r"))[1]["DATA_PREFIX"] == "/d"


def test_a_run_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arm: step.Arm, *_: object, patience: float | None = None) -> str:
        if arm.engine:
            raise SystemExit("x.sh failed: pretrain_gpt: no")
        return log(250.0, 6.5)

    out = tmp_path / "step.json"
    monkeypatch.setattr(step, "run", run)
    monkeypatch.setattr(step, "need_gpu", lambda: None)
    monkeypatch.setattr("sys.argv", ["x", "--arms", "dmoe-small-te,dense-xs", "--rounds", "2", "--out", str(out)])
    assert step.main() == 1
    result = measure.read_result(out)
    assert [record["arm"] for record in result["records"]] == ["dense-xs", "dense-xs"]
    assert capsys.readouterr().out.count("pretrain_gpt: no") >= 1


def test_a_run_beyond_the_patience_is_ended(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "slow.sh").write_text("sleep 60 & wait")
    (tmp_path / "exp" / "bad.sh").write_text("echo 'pretrain_gpt: seq_length=0: must be > 0' >&2; echo W >&2; exit 2")
    with pytest.raises(SystemExit, match="slow.sh took longer than 1 s"):
        step.run(step.Arm("M", "slow.sh", ""), tmp_path, tmp_path, patience=1.0)
    with pytest.raises(SystemExit, match=r"bad.sh failed: pretrain_gpt: seq_length=0: must be > 0$"):
        step.run(step.Arm("M", "bad.sh", ""), tmp_path, tmp_path)


def test_the_peak_of_memory_is_read_until_the_last_step() -> None:
    flags = step.command_of(step.ARMS["dmoe-xs"], Path("/c"), Path("/d"), Path("/r"))[1]["FLAGS"].split()
    assert flags[flags.index("--log-memory-interval") + 1] == str(step.INTERVAL) and step.STEPS % step.INTERVAL == 0
    later = "[Rank 0] (after 30 iterations) memory (MB) | allocated: 1.0 | max allocated: 3072.0 | reserved: 4096.0"
    assert step.read_log(f"{log(250.0, 6.5)}\n{later}").peak_gib == 3.0


def test_an_arm_says_whose_block_it_has() -> None:
    for name, arm in step.ARMS.items():
        flags = step.command_of(arm, Path("/c"), Path("/d"), Path("/r"))[1]["FLAGS"]
        assert ("--transformer-impl transformer_engine" in flags) == ("-te" in name) == arm.engine, name
        assert ("--transformer-impl local" in flags) != arm.engine, name
        assert ("--attention-backend fused" in flags) == arm.engine, name  # else a fallback to unfused would be timed
