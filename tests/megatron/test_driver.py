"""The training driver as a user runs it: a launch through torchrun, one process without it, what it writes."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training")

from driver import EXPERTS, ROOT, TINY, Driver, read_csv  # noqa: E402

from megablocks.config import ConfigError  # noqa: E402
from megablocks.megatron.reporting import Reporter  # noqa: E402
from megablocks.monitor.expert_load import ExpertLoad  # noqa: E402
from megablocks.monitor.history import History, parse_log_line  # noqa: E402


def check_files(folder: Path, text: str, layers: int) -> None:
    """CSV values equal those of the log, pictures and env.txt are there, and no temporary file is left."""
    logged = _lines(text)
    rows = {int(row["iteration"]): row for row in read_csv(folder / "loss.csv")}
    assert sorted(rows) == sorted(logged)
    for iteration, values in logged.items():
        row = rows[iteration]
        assert float(row["train_loss"]) == pytest.approx(values["lm loss"], rel=1e-6)
        assert float(row["grad_norm"]) == pytest.approx(values["grad norm"], abs=1e-3)
        assert float(row["tokens_per_second"]) == pytest.approx(values["tokens/s"], abs=0.51)
        rate = values["global batch size"] * 32 / values["elapsed time per iteration (ms)"] * 1000
        assert values["tokens/s"] == pytest.approx(rate, rel=1e-3, abs=0.51)
        assert row["mfu"] == "" and "MFU" not in "".join(values)  # a CPU has no known peak
        if layers:
            assert row["tokens_dropped"] == "0" and values["tokens dropped"] == 0
    losses = dict(re.findall(r"validation loss at iteration (\d+)[^|]*\| lm loss value: (\S+)", text))
    for iteration, loss in losses.items():
        assert float(rows[int(iteration)]["validation_loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "commit: " in (folder / "env.txt").read_text()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    if layers:
        load = read_csv(folder / "expert_load.csv")
        assert (folder / "expert_load.png").read_bytes().startswith(b"\x89PNG")
        per_layer = [sum(int(row["tokens"]) for row in load if row["layer"] == str(n + 1)) for n in range(layers)]
        assert per_layer == [4 * 32 * 2] * layers  # the last interval: 4 sequences of 32 tokens, top-2
        last = rows[max(rows)]
        shares = [max(float(r["tokens_over_mean"]) for r in load if r["layer"] == str(n + 1)) for n in range(layers)]
        assert float(last["expert_load_max_over_mean"]) == pytest.approx(sum(shares) / layers, abs=1e-3)


LATE = """
import os, signal, sys


class Last:
    def __del__(self, kill=os.kill, rank=os.getpid(), number=signal.SIGTERM):
        kill(rank, number)


if "RANK" in os.environ:
    sys.modules["last"] = Last()
"""


def test_two_processes_through_torchrun_learn_and_report(tiny_data: Path, tmp_path: Path) -> None:
    """A signal that asks a rank to save and exit arrives while Python ends: the run is whole all the same."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megablocks.megatron.pretrain_gpt", *TINY, *EXPERTS, "--data-prefix", str(tiny_data)]
    command += ["--train-iters", "12", "--eval-interval", "6", "--megablocks-run-dir", str(run)]
    command += ["--tensorboard-dir", str(tmp_path / "board")]
    (tmp_path / "sitecustomize.py").write_text(LATE)
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    text = done.stdout
    assert done.returncode == 0, text[-3000:] + done.stderr[-3000:]
    rows = read_csv(run / "loss.csv")
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 1.5
    check_files(run, text, layers=2)
    summary = next(line for line in text.splitlines() if line.startswith("validation loss "))
    parts = r"validation loss ([\d.]+) nats \| unigram entropy ([\d.]+) nats \| (below|above) by ([\d.]+) nats"
    match = re.fullmatch(parts + r" \| tokens dropped: 0 \| tokens/s \d+", summary)
    assert match and match[3] == ("below" if float(match[1]) <= float(match[2]) else "above")
    assert float(match[4]) == pytest.approx(abs(float(match[2]) - float(match[1])), abs=2e-4)
    assert len(re.findall(r"^set automatically: transformer_impl = local", text, flags=re.M)) == 1
    assert len(re.findall(r"^done at iteration 12$", text, flags=re.M)) == 1
    assert list((tmp_path / "board").glob("events*"))


@pytest.mark.parametrize(("loss", "said"), [(2.5, "below by 1.5000 nats"), (4.25, "above by 0.2500 nats")])
def test_the_last_line_says_on_which_side_of_the_entropy_the_loss_is(tmp_path: Path, loss: float, said: str) -> None:
    reporter = object.__new__(Reporter)
    reporter.history, reporter.entropy, reporter.layers, reporter._rates = History(tmp_path), 4.0, [], []
    reporter.history.rows[1] = {"validation_loss": loss}
    assert reporter.summary_line().endswith(said)


def test_K6_a_disk_that_fills_up_at_the_last_point_of_tensorboard_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Thread(threading.Thread):
        __module__ = "tensorboard.summary.writer.event_file_writer"

    monkeypatch.setattr("megablocks.megatron.reporting.is_last_rank", lambda: True)
    reporter = object.__new__(Reporter)
    reporter.args, reporter.run_dir, reporter._board_error = argparse.Namespace(tensorboard_dir="board"), None, None
    reporter.history, reporter.entropy, reporter.layers, reporter._rates = History(Path()), None, [], []
    others: list[object] = []
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), ValueError()):
        reporter._thread_failed(others.append, threading.ExceptHookArgs((type(error), error, None, Thread())))
    reporter.finish()
    assert len(others) == 2
    assert capsys.readouterr().out == "board: full; the last points are lost\nnothing was trained\n"


@pytest.mark.parametrize(("name", "losses"), [("", [4.5]), ("-0", [4.5]), ("-1", [])])
def test_the_loss_of_the_first_validation_set_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, losses: list[float]
) -> None:
    """With several sets, which --full-validation asks for, Megatron numbers them."""
    monkeypatch.setattr("megablocks.megatron.reporting.is_last_rank", lambda: True)
    reporter = object.__new__(Reporter)
    reporter.history, reporter.run_dir = History(Path()), None
    reporter._print(print, f" validation{name} loss at iteration 4 on validation set | lm loss value: 4.5E+00 | ")
    assert reporter.history.series("validation_loss")[1] == losses


def test_layers_with_another_number_of_experts_are_refused_before_training() -> None:
    """As of a --spec of the user's. The table of the load has one number of experts for all layers."""
    reporter = object.__new__(Reporter)
    reporter.args, reporter.layers = argparse.Namespace(num_experts=4), [1, 2]
    chunk = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for number, (layer, experts) in enumerate(zip(chunk, (4, 8), strict=True), start=1):
        layer.layer_number, layer.expert_load = number, ExpertLoad(experts)
    line = "num_experts=4: layer 2 has 8 experts; must be the number of every layer that counts its load"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        reporter._setup(lambda: ([chunk], None, None))


def test_losses_are_read_once_a_log_interval(driver: Driver, tmp_path: Path) -> None:
    """A line and a point have what the lines of every step say, also where a board is asked for more points."""
    each = _lines(driver.run("--train-iters", "8", "--log-interval", "1").text())
    names = ("lm loss", "load_balancing_loss")
    each[2] |= {name: 2 * each[2][name] - each[1][name] for name in names}  # the second line is a mean with the first
    flags = ("--train-iters", "8", "--log-interval", "4", "--tensorboard-dir")
    for board, more, steps in (("four", (), [4, 8]), ("three", ("--tensorboard-log-interval", "3"), [3, 6])):
        lines = _lines(driver.run(*flags, tmp_path / board, *more).text())
        points = _points(tmp_path / board)
        # Megatron has the experts' losses also of each step that it logs, the first one too
        for name, of_steps in zip(names, (steps, sorted({1, 4, 8, *steps})), strict=True):
            assert [step for step, _ in points[name]] == of_steps
            assert all(value == pytest.approx(each[step][name], rel=2e-6) for step, value in points[name])
            for last in (4, 8):
                mean = sum(each[step][name] for step in range(last - 3, last + 1)) / 4
                assert lines[last][name] == pytest.approx(mean, rel=2e-6)


def test_a_step_between_two_lines_asks_no_other_rank() -> None:
    reporter, asked = object.__new__(Reporter), {}
    reporter.args = argparse.Namespace(log_interval=4, tensorboard_log_interval=4)
    reporter.layers = []

    def log(losses: dict[str, Any], *_: Any) -> None:
        asked[step] = (list(losses), reporter._board(lambda: "writer"), reporter._max_over_ranks(lambda rate: "all", 1))

    for step in (3, 4):
        reporter._training_log(log, {"lm loss": torch.ones(())}, {}, 1, step, 1.0, False, 0)
    assert asked == {3: ([], None, 1), 4: (["lm loss"], "writer", "all")}


def _lines(text: str) -> dict[int, dict[str, float]]:
    lines = (parse_log_line(line) for line in text.splitlines() if "elapsed time per iteration" in line)
    return {int(values["iteration"]): values for values in lines}


def _points(board: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board), size_guidance={"scalars": 0}).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_is_written_at_once_as_other_ranks_write_theirs_between(stream: str) -> None:
    program = f"""import sys
from megablocks.megatron import pretrain_gpt
pretrain_gpt.print_whole_lines()
print("one", 2, file=sys.{stream})
print("no end", end="", file=sys.{stream}, flush=True)
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each write is received as one message
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-u", "-c", program], check=True, cwd=ROOT, **{stream: theirs})
        assert [ours.recv(100) for _ in range(3)] == [b"one 2\n", b"no end", b""]


def test_a_dense_model_in_one_process_without_torchrun(driver: Driver, tmp_path: Path) -> None:
    flags = ("--train-iters", "6", "--eval-interval", "3", "--megablocks-run-dir", tmp_path / "run", "--swiglu")
    run = driver.run(*flags, model=TINY, torchrun=False, faults=[("say_whose_thread", {})])
    losses = run.losses()
    assert losses[6] < losses[1] - 0.5
    assert set(re.findall("backward in its caller's thread: (.*)", run.text())) == {"True"}
    assert "expert load" not in run.text() and "tokens dropped" not in run.text()
    check_files(tmp_path / "run", run.text(), layers=0)
    assert not (tmp_path / "run" / "expert_load.csv").exists()


def test_capacity_drops_tokens_and_the_log_counts_them(driver: Driver, tmp_path: Path) -> None:
    flags = ("--train-iters", "2", "--megablocks-run-dir", tmp_path / "run", "--moe-capacity-factor", "0.5")
    run = driver.run(*flags)
    total = 0
    for row in read_csv(tmp_path / "run" / "loss.csv"):
        line = next(one for one in run.text().splitlines() if re.search(rf"iteration +{row['iteration']}/", one))
        total += int(parse_log_line(line)["tokens dropped"])
        assert int(row["tokens_dropped"]) == total
    # 128 pairs a layer and micro-batch, at most half of them fit.
    assert total >= 2 * 2 * 2 * 64
    assert f"tokens dropped: {total} | tokens/s" in run.text()


def test_a_run_in_the_folder_of_an_earlier_one_keeps_its_losses(driver: Driver, tmp_path: Path) -> None:
    first = driver.run("--train-iters", "2", "--megablocks-run-dir", tmp_path / "run")
    losses = (tmp_path / "run/loss.csv").read_bytes()
    second = driver.run("--train-iters", "1", "--megablocks-run-dir", tmp_path / "run", "--seed", "7")
    assert (tmp_path / "run/loss-1.csv").read_bytes() == losses != (tmp_path / "run/loss.csv").read_bytes()
    said = f"{tmp_path / 'run/loss-1.csv'}: the losses of an earlier run in this folder"
    assert said in second.text() and said not in first.text()


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(driver: Driver, tmp_path: Path) -> None:
    """It counts what was dropped before its save, which ended no log interval. Its first step is no row."""
    flags = ("--moe-capacity-factor", "0.5", "--train-iters", "4", "--log-interval", "2")
    driver.run(*flags, "--megablocks-run-dir", tmp_path / "straight")
    save = ("--megablocks-run-dir", tmp_path / "run", "--save", tmp_path / "saved", "--save-interval", "3")
    driver.run(*flags, *save, "--exit-interval", "3")
    driver.run(*flags, *save, "--load", tmp_path / "saved")
    straight, resumed = (read_csv(tmp_path / name / "loss.csv") for name in ("straight", "run"))
    assert [row["iteration"] for row in straight] == ["1", "2", "4"]
    assert [(row["iteration"], row["train_loss"] == "") for row in resumed] == [
        ("1", False), ("2", False), ("3", True), ("4", False),
    ]  # fmt: skip
    assert resumed[-1]["tokens_dropped"] == straight[-1]["tokens_dropped"]
    assert int(straight[-1]["tokens_dropped"]) > int(straight[1]["tokens_dropped"])


def test_K1_a_run_resumes_with_or_without_fused_main_gradients(driver: Driver, tmp_path: Path) -> None:
    """A checkpoint does not depend on them: a run without equals one that fuses them in three steps of six."""
    model = (*TINY, *EXPERTS, "--megablocks-mlp-impl", "fused", "--train-iters", "6", "--micro-batch-size", "1")
    straight = driver.run(model=model).losses()
    save = ("--save", tmp_path / "saved", "--save-interval", "3")
    first = driver.run("--megablocks-gradient-accumulation-fusion", "--exit-interval", "3", *save, model=model).losses()
    resumed = driver.run("--load", tmp_path / "saved", model=model).losses()
    assert first == {step: straight[step] for step in (1, 2, 3)}
    assert resumed == {step: straight[step] for step in (4, 5, 6)}


@pytest.mark.parametrize(
    "flags", ["--fp16 --initial-loss-scale 4e6 --hysteresis 1", "--optimizer sgd", "--optimizer sgd --sgd-momentum 0"]
)
def test_K1_a_run_resumes_before_its_first_update_and_with_any_optimizer(
    driver: Driver, tmp_path: Path, flags: str
) -> None:
    """At a large loss scale the first steps of fp16 overflow, and Adam has no state yet."""
    model = (*TINY, *flags.split(), "--train-iters", "7")

    def steps(*more: Any) -> list[tuple[str, ...]]:
        text = driver.run(*more, model=model).text()
        return re.findall(r"iteration +(\d+)/.*? loss scale: (\S+) \| (?:grad norm: (\S+))?", text)

    straight = steps()
    save = ("--save", tmp_path / "saved", "--save-interval", "2")
    assert [*steps("--exit-interval", "2", *save), *steps("--load", tmp_path / "saved")] == straight
    assert len(straight) == 7 and ("fp16" in flags) == (straight[1][1] != straight[2][1])


def test_every_rank_reads_the_micro_batches_of_an_evaluation(driver: Driver) -> None:
    """With tensor parallelism the first rank reads them, and the others must know their size."""
    model = (*TINY, "--train-iters", "2", "--eval-interval", "2", "--tensor-model-parallel-size", "2")

    def losses(*flags: str) -> list[float]:
        text = driver.run(*flags, ranks=2, model=model).text()
        found = re.findall(r"validation loss at iteration [^|]*\| lm loss value: (\S+)", text)
        return list(map(float, found))

    small = losses()
    assert losses("--eval-micro-batch-size", "4") == pytest.approx(small, rel=1e-5) and len(small) == 2


def test_a_fixed_validation_reads_the_same_samples_each_time_with_every_seed(driver: Driver, tmp_path: Path) -> None:
    """With a learning rate of nothing the weights stay, so equal samples are an equal loss, and others another one."""
    model = (*TINY, "--lr", "1e-30", "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2")
    save = ("--save", tmp_path / "saved", "--save-interval", "2")

    def losses(*flags: Any) -> list[str]:
        text = driver.run(*flags, model=model).text()
        return re.findall(r"validation loss at iteration [^|]*\| lm loss value: (\S+)", text)

    fixed = losses("--megablocks-fixed-validation", *save, "--exit-interval", "2")
    assert len(fixed) == 1
    resumed = losses("--megablocks-fixed-validation", "--load", tmp_path / "saved")
    again = ("--load", tmp_path / "saved", "--finetune", "--seed", "99")
    other = losses("--megablocks-fixed-validation", *again)
    assert resumed == fixed * 2 and other == fixed * 3, "the last one is that of the end"
    assert len({*fixed, *losses(*again)}) == 4, "without the flag each evaluation reads other samples"


def test_S2_a_run_with_the_fused_loss_equals_one_without(driver: Driver) -> None:
    model = (*TINY, "--untie-embeddings-and-output-weights", "--train-iters", "4", "--eval-interval", "2")
    plain, fused = driver.run(model=model), driver.run("--megablocks-fused-loss", model=model)
    assert "set automatically: megablocks_fused_loss = False (no GPU)" in plain.text()
    assert fused.losses() == pytest.approx(plain.losses(), rel=1e-5)
    validation = r"validation loss at iteration \d+[^|]*\| lm loss value: (\S+)"
    found, want = (list(map(float, re.findall(validation, run.text()))) for run in (fused, plain))
    assert found == pytest.approx(want, rel=1e-5) and len(want) >= 2
    assert "fused loss:" not in plain.text() + fused.text()
    flags = ("--megablocks-fused-loss", "--cross-entropy-loss-fusion")
    without = driver.run(*flags, model=model, env={"TORCHDYNAMO_DISABLE": "1"})  # Megatron compiles its own
    assert without.losses() == pytest.approx(plain.losses(), rel=1e-3)  # and rounds the gradient to bf16 there
    (line,) = re.findall("fused loss: .*", without.text())
    assert "Megatron's own cross entropy instead, because of cross_entropy_loss_fusion=True" in line


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        pytest.param("--pipeline-model-parallel-size 2 --num-layers 4", marks=SLOW),
        pytest.param("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16", marks=SLOW),
        pytest.param("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", marks=SLOW),
        pytest.param("--megablocks-layer megatron", marks=SLOW),
        pytest.param("--megablocks-layer experts", marks=SLOW),
    ],
)
def test_layouts_and_layers_learn_under_the_guards(driver: Driver, tmp_path: Path, flags: str) -> None:
    model = [*TINY, *"--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2".split(), *flags.split()]
    guards = ("--train-iters", "6", "--megablocks-loss-spike-factor", "5", "--megablocks-run-dir", tmp_path / "run")
    run = driver.run(*guards, ranks=4 if "pipeline" in flags or "tensor" in flags else 2, model=model)
    losses = run.losses()
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1] - 0.5
    if "megatron" not in flags:
        assert "tokens dropped: 0" in run.text()


def test_an_interrupt_of_the_process_group_is_left_to_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal sends Ctrl-C to the data loader's processes too."""
    from megablocks.megatron.pretrain_gpt import save_at_interrupt

    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        save_at_interrupt(signal.SIGTERM)
        worker = os.fork()
        if worker == 0:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            os._exit(len(asked))
        assert os.waitpid(worker, 0)[1] == 0
        signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert asked == [signal.SIGTERM]
    assert capfd.readouterr().err.count("interrupted: saving after this iteration") == 1


_INTERRUPTED = """
import importlib.abc, runpy, signal, sys
class Ctrl_C(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "megablocks.monitor.guards":  # which imports torch
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Ctrl_C())
runpy.run_module("megablocks.megatron.pretrain_gpt", run_name="__main__")
"""


def test_an_interrupt_while_torch_is_imported_is_one_line() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "pretrain_gpt: interrupted before training\n")
