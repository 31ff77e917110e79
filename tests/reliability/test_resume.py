"""Resuming with other flags, and from a checkpoint that somebody else wrote: what is refused, and what allows it."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
from driver import EXPERTS, TINY, Driver, Zygote

pytest.importorskip("megatron.training")

from megablocks.checkpoint import atomic  # noqa: E402

MODEL = (*TINY[: TINY.index("--lr-decay-iters")], *TINY[TINY.index("--lr-decay-iters") + 2 :], *EXPERTS)
STEPS = ("--train-iters", "4")


@pytest.fixture(scope="module")
def checkpoint(zygote: Zygote, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, stopped and saved after two."""
    folder = tmp_path_factory.mktemp("resume")
    flags = (*STEPS, "--exit-interval", "2", "--save", str(folder / "run"), "--save-interval", "2")
    Driver(zygote, tiny_data, folder).run(*flags, model=MODEL)
    return folder / "run"


def line_of(driver: Driver, *flags: Any, expect: int = 1, env: dict[str, str] | None = None) -> str:
    """The one line that refuses a run, without a traceback and before its first step."""
    run = driver.run(*flags, model=MODEL, expect=expect, env=env)
    lines = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert len(lines) == 1 and "Traceback" not in run.text() and not run.losses(), run.text()[-3000:]
    return lines[0]


OTHER = {
    "--moe-router-topk 1": "moe_router_topk=1 (saved: 2)",
    "--moe-capacity-factor 1.5": "megablocks_capacity_factor=1.5 (saved: None)",
    "--megablocks-layer tutel": (
        "megablocks_capacity_factor=1.0 (saved: None), megablocks_capacity_rule='tutel' (saved: 'megablocks')"
    ),
    "--squared-relu": "squared_relu=True (saved: False)",
    "--seq-length 16": "seq_length=16 (saved: 32), max_position_embeddings=16 (saved: 32)",
    "--hidden-size 64": "hidden_size=64 (saved: 32)",
    "--bf16": "bf16=True (saved: False)",
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma=True (saved: False)",
    "--norm-epsilon 1e-3": "layernorm_epsilon=0.001 (saved: 1e-05)",
}


@pytest.mark.parametrize("flags", OTHER)
def test_another_model_is_refused(driver: Driver, checkpoint: Path, flags: str) -> None:
    changed = flags.replace("--moe-router-topk 1", "--moe-top-k 1").split()
    line = line_of(driver, *STEPS, "--load", checkpoint, *changed)
    assert f"{atomic.folder_of(checkpoint, 2)}: saved as another model: {OTHER[flags]}" in line
    assert "; give the saved values, or --finetune to start at" in line


def test_a_checkpoint_of_torchs_format_is_compared_too(driver: Driver, tmp_path: Path) -> None:
    of_torch = (*STEPS, "--ckpt-format", "torch", "--load", tmp_path / "run")
    driver.run(*of_torch, "--exit-interval", "2", "--save", tmp_path / "run", "--save-interval", "2", model=MODEL)
    line = line_of(driver, *of_torch, "--squared-relu")
    assert f"{tmp_path / 'run'}: saved as another model: squared_relu=True (saved: False); give the saved" in line
    line = line_of(driver, *of_torch, "--adam-beta1", "0.5")
    assert "saved with another optimizer: adam_beta1=0.5 (saved: 0.9)" in line
    run = driver.run(*of_torch, "--seed", "5", "--ckpt-step", "2", model=MODEL)
    assert sorted(run.losses()) == [3, 4] and run.text().count("saved with seed=5 (saved: 1234)") == 1
    run = driver.run(*of_torch, "--use-checkpoint-args", "--ckpt-step", "2", model=MODEL)
    assert sorted(run.losses()) == [3, 4] and "WARNING: /" not in run.text()


@pytest.mark.parametrize("allowed", ["--megablocks-allow-other-model", "--finetune"])
def test_another_model_that_fits_the_weights_can_be_allowed(driver: Driver, checkpoint: Path, allowed: str) -> None:
    run = driver.run(*STEPS, "--load", checkpoint, "--moe-top-k", "1", allowed, model=MODEL)
    assert sorted(run.losses()) == ([1, 2, 3, 4] if allowed == "--finetune" else [3, 4])
    warned = f"WARNING: {atomic.folder_of(checkpoint, 2)}: saved as another model: moe_router_topk=1 (saved: 2)"
    assert (warned in run.text()) == (allowed != "--finetune")


def test_a_model_without_the_saved_gate_is_refused(driver: Driver, tmp_path: Path) -> None:
    """It went on without the gate: Megatron ignores weights that the model lacks."""
    shared = (*STEPS, "--moe-shared-expert-intermediate-size", "32")
    saved = ("--moe-shared-expert-gate", "--exit-interval", "2", "--save", tmp_path, "--save-interval", "2")
    driver.run(*shared, *saved, model=MODEL)
    line = line_of(driver, *shared, "--load", tmp_path)
    assert "saved as another model: moe_shared_expert_gate=False (saved: True); give the saved values" in line


def test_a_checkpoint_without_optimizer_names_the_flags_that_do_without_it(driver: Driver, tmp_path: Path) -> None:
    saved = ("--exit-interval", "2", "--save", tmp_path / "run", "--save-interval", "2", "--no-save-optim")
    driver.run(*STEPS, *saved, model=MODEL)
    line = line_of(driver, *STEPS, "--load", tmp_path / "run")
    assert f"{atomic.folder_of(tmp_path / 'run', 2)}: saved without the optimizer's state (--no-save-optim); " in line
    assert "give --no-load-optim to start it anew, or --finetune to start at iteration 0" in line
    for allowed, steps in (("--no-load-optim", [3, 4]), ("--finetune", [1, 2, 3, 4])):
        assert sorted(driver.run(*STEPS, "--load", tmp_path / "run", allowed, model=MODEL).losses()) == steps


def test_a_checkpoint_without_random_numbers_names_the_flags_that_do_without_them(
    driver: Driver, tmp_path: Path
) -> None:
    """It went on without a word, with other dropout masks than those of a run that was not stopped."""
    saved = ("--exit-interval", "2", "--save", tmp_path / "run", "--save-interval", "2", "--no-save-rng")
    driver.run(*STEPS, *saved, model=MODEL)
    line = line_of(driver, *STEPS, "--load", tmp_path / "run")
    assert f"{atomic.folder_of(tmp_path / 'run', 2)}: saved without the random number generators' state (--no-" in line
    assert "give --no-load-rng to start them anew, or --finetune to start at iteration 0" in line
    assert sorted(driver.run(*STEPS, "--load", tmp_path / "run", "--no-load-rng", model=MODEL).losses()) == [3, 4]


def test_a_run_with_dropout_and_cyclic_data_resumes_exactly(driver: Driver, tmp_path: Path) -> None:
    """The data loader took its first random number from the generator of dropout, at its first batch."""
    flags = (*STEPS, "--dataloader-type", "cyclic", "--hidden-dropout", "0.1", "--save", tmp_path / "run")
    straight = driver.run(*flags, "--save-interval", "2", model=MODEL)
    shutil.rmtree(atomic.folder_of(tmp_path / "run", 4))
    atomic.write_pointer(tmp_path / "run", 2)
    resumed = driver.run(*flags, "--save-interval", "9", "--load", tmp_path / "run", model=MODEL)
    assert resumed.losses() == {step: straight.losses()[step] for step in (3, 4)}


def test_another_padding_of_the_vocabulary_is_said_with_the_flag_that_keeps_it(
    driver: Driver, checkpoint: Path
) -> None:
    """Tensor parallelism doubles what the vocabulary is padded to. Such a run went on with a higher loss."""
    flags = (*STEPS, "--load", checkpoint, "--make-vocab-size-divisible-by")
    text = driver.run(*flags, "640", model=MODEL).text()
    [(saved, given, advised)] = re.findall(
        r"saved with padded_vocab_size=(\d+), this run has (\d+): .* --make-vocab-size-divisible-by (\d+) keeps", text
    )
    assert given != saved == advised
    assert "padded_vocab_size" not in driver.run(*flags, advised, model=MODEL).text().partition("WARNING")[2]


def test_another_kind_of_optimizer_names_its_flag(driver: Driver, checkpoint: Path) -> None:
    line = line_of(driver, *STEPS, "--load", checkpoint, "--use-distributed-optimizer")
    assert "another optimizer: use_distributed_optimizer=True (saved: False); give the saved value, or --no" in line
    line = line_of(driver, *STEPS, "--load", checkpoint, "--optimizer", "sgd")
    assert "saved with another optimizer: optimizer='sgd' (saved: 'adam'); give the saved values, or --no-load" in line
    allowed = ("--use-distributed-optimizer", "--no-load-optim")
    assert sorted(driver.run(*STEPS, "--load", checkpoint, *allowed, model=MODEL).losses()) == [3, 4]


@pytest.mark.parametrize("flag", ["--save", "--megablocks-run-dir", "both"])
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(driver: Driver, flag: str) -> None:
    folder, other = driver.folder / "run", ("--save", driver.folder / "2", "--save-interval", "9", "--train-iters", "1")
    more = ("--load", folder, "--save-interval", "99999") if flag == "--save" else ()
    flags = ("--train-iters", "100000", "--megablocks-run-dir" if flag == "both" else flag, folder, *more)
    with driver.start(*flags, model=MODEL) as first:
        first.wait_for(r"iteration +2/")
        line = line_of(driver, *flags, *(other if flag == "both" else ()), expect=2)
        assert f"{folder}: is in use by another run; wait until it ends, or choose another folder" in line
    first.wait()  # killed
    driver.run("--train-iters", "1", *flags[2:], model=MODEL)


def test_a_folder_that_cannot_be_made_is_one_line(driver: Driver) -> None:
    """The rights of /proc let root write, and the system does not: as on a full disk, env.txt is the first to fail."""
    assert "/proc" in line_of(driver, *STEPS, "--megablocks-run-dir", "/proc/none", expect=2)
    saved = ("--megablocks-run-dir", driver.folder / "run", "--save", "/proc/none", "--save-interval", "9")
    assert "/proc/none: cannot be written: " in line_of(driver, *STEPS, *saved, expect=2)


def test_weights_that_do_not_fit_are_one_line_even_where_another_model_is_allowed(
    driver: Driver, checkpoint: Path
) -> None:
    line = line_of(driver, *STEPS, "--load", checkpoint, "--swiglu", "--megablocks-allow-other-model")
    assert f"{atomic.folder_of(checkpoint, 2)}: cannot be loaded: " in line


def test_the_weights_of_another_layer_name_its_flag(driver: Driver, checkpoint: Path) -> None:
    line = line_of(driver, *STEPS, "--load", checkpoint, "--megablocks-layer", "megatron")
    assert "saved with other weights: megablocks_layer='megatron' (saved: 'megablocks'); give the saved value" in line


def test_another_schedule_is_refused_and_each_advice_works(driver: Driver, checkpoint: Path) -> None:
    longer = ("--train-iters", "6", "--load", checkpoint)
    line = line_of(driver, *longer)
    assert "another learning-rate schedule: train_iters=6 (saved: 4), lr_decay_iters=6 (saved: 4); give" in line
    for advice in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert advice in line
        assert sorted(driver.run(*longer, advice, model=MODEL).losses()) == [3, 4, 5, 6]


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)], ids=["", "distributed"])
def test_another_learning_rate_is_refused_and_each_advice_works(
    driver: Driver, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Megatron finds the optimizer's groups by their rates, so it failed at another one with both advised flags too."""
    steady = ("--lr-decay-style", "constant", "--save", tmp_path / "run", "--save-interval", "2", *flags)
    driver.run(*STEPS, "--exit-interval", "2", *steady, model=MODEL)
    more = (*STEPS, *steady[:2], *flags, "--load", tmp_path / "run", "--lr", "2e-3", "--min-lr", "1e-3")
    assert "another learning-rate schedule: lr=0.002 (saved: 0.01), min_lr=0.001 (saved: 0.0); give" in line_of(
        driver, *more
    )
    for advice, rate in (("override", 2e-3), ("use-checkpoint", 1e-2)):
        text = driver.run(*more, f"--{advice}-opt-param-scheduler", model=MODEL).text()
        assert [float(one) for one in re.findall(r"learning rate: (\S+)", text)] == [rate, rate]
    # The log has the rate after a step. In the first one a rate near 0 must hold as well, which changes no weight.
    near_0 = (*more[:-4], "--lr", "1e-12")
    ways = ("--override-opt-param-scheduler", "--no-load-optim")
    still, anew = (driver.run(*near_0, way, model=MODEL).losses() for way in ways)
    assert still == anew


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lr-wsd-decay-iters 1", "another learning-rate schedule: lr_wsd_decay_iters=1 (saved: 3); give"),
        (
            "--lr-wsd-decay-style cosine",
            "another learning-rate schedule: lr_wsd_decay_style='cosine' (saved: 'linear')",
        ),
        (
            "--adam-beta1 0.5",
            "another optimizer: adam_beta1=0.5 (saved: 0.9); give the saved values, or --no-load-optim",
        ),
    ],
)
def test_what_megatron_neither_saves_nor_compares_is_refused(
    driver: Driver, tmp_path: Path, flags: str, said: str
) -> None:
    decay = ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3", "--lr-wsd-decay-style", "linear")
    driver.run(*STEPS, *decay, "--exit-interval", "2", "--save", tmp_path / "run", "--save-interval", "2", model=MODEL)
    more = (*STEPS, *decay, "--load", tmp_path / "run", *flags.split())
    line = line_of(driver, *more)
    assert said in line
    advice = "--no-load-optim" if "optimizer" in said else "--override-opt-param-scheduler"
    assert advice in line and sorted(driver.run(*more, advice, model=MODEL).losses()) == [3, 4]


def test_without_the_optimizers_state_the_schedule_continues(driver: Driver, checkpoint: Path) -> None:
    """Megatron's starts again: a run at its end would repeat the warm-up and the highest rate."""
    resumed, anew = (
        driver.run(*STEPS, "--load", checkpoint, *flags, model=MODEL).text() for flags in ((), ("--no-load-optim",))
    )
    rates = re.findall(r"learning rate: (\S+)", resumed)
    assert rates == re.findall(r"learning rate: (\S+)", anew) and len(rates) == 2


def test_the_saved_schedule_decides_the_first_weight_decay_too(driver: Driver, checkpoint: Path) -> None:
    """Megatron sets the optimizer's weight decay before it reads the saved one."""
    losses = driver.run(*STEPS, "--load", checkpoint, model=MODEL).losses()
    saved = ("--weight-decay", "5", "--use-checkpoint-opt-param-scheduler")
    assert driver.run(*STEPS, "--load", checkpoint, *saved, model=MODEL).losses() == losses


def test_another_order_of_the_samples_is_said(driver: Driver, checkpoint: Path) -> None:
    """Such a run reads samples a second time and leaves others out."""
    text = driver.run(*STEPS, "--load", checkpoint, "--seed", "7", "--dataloader-type", "cyclic", model=MODEL).text()
    assert "WARNING: " in text and "saved with seed=7 (saved: 1234), dataloader_type='cyclic' (saved: 'single')" in text
    assert "another order" not in driver.run(*STEPS, "--load", checkpoint, model=MODEL).text()


def test_a_finished_run_names_its_last_iteration_again(driver: Driver, checkpoint: Path) -> None:
    run = driver.run("--train-iters", "2", "--load", checkpoint, "--override-opt-param-scheduler", model=MODEL)
    assert not run.losses() and "\ndone at iteration 2\n" in run.text()


def test_a_checkpoint_without_our_files_still_loads(driver: Driver, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "run")
    folder = atomic.folder_of(tmp_path / "run", 2)
    for name in (atomic.MARKER, "megablocks.json"):
        (folder / name).unlink()
    run = driver.run(*STEPS, "--load", tmp_path / "run", model=MODEL)
    assert sorted(run.losses()) == [3, 4] and "loaded without verification" in run.text()


@pytest.mark.parametrize("load", [(), ("--load", "new", "--save", "new", "--save-interval", "9")], ids=["", "new"])
def test_K5_a_pretrained_checkpoint_is_verified_too(
    driver: Driver, checkpoint: Path, tmp_path: Path, load: tuple[str, ...]
) -> None:
    """Its weights start a run at iteration 0, also where --load names the folder that the run will resume from."""
    load = tuple(str(tmp_path / flag) if flag == "new" else flag for flag in load)
    shutil.copytree(checkpoint, tmp_path / "run")
    flags = (*STEPS, *load, "--pretrained-checkpoint", tmp_path / "run")
    finetuned = driver.run(*STEPS, "--load", checkpoint, "--finetune", model=MODEL)
    assert driver.run(*flags, model=MODEL).losses() == finetuned.losses()
    if load:
        shutil.rmtree(tmp_path / "new")
    (path,) = atomic.folder_of(tmp_path / "run", 2).glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert f"{path}: sha256 differs from what was saved" in line_of(driver, *flags)
    path.with_name(atomic.MARKER).unlink()
    (tmp_path / "run" / atomic.POINTER).unlink()
    assert f"{tmp_path / 'run'}: no complete checkpoint to start with" in line_of(driver, *flags)


def test_a_run_with_the_flags_of_a_pretrained_checkpoint_resumes(
    driver: Driver, checkpoint: Path, tmp_path: Path
) -> None:
    """Megatron reads the flags of both checkpoints, of the step at which the run resumes."""
    own = ("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-2", "--log-interval", "1")
    flags = (*STEPS, "--use-checkpoint-args", "--pretrained-checkpoint", checkpoint, "--load", tmp_path)
    flags += ("--save", tmp_path, "--save-interval", "1", "--eval-iters", "0")
    assert sorted(driver.run(*flags, "--exit-interval", "1", model=own).losses()) == [1]
    assert sorted(driver.run(*flags, model=own).losses()) == [2, 3, 4]


def test_use_checkpoint_args_takes_all_that_defines_the_model(driver: Driver, tmp_path: Path) -> None:
    """Megatron reads a part of it. With --finetune, which compares nothing, another model was trained silently."""
    model = ("--norm-epsilon", "1e-2", "--qk-layernorm", "--moe-capacity-factor", "1.5")
    driver.run(*STEPS, *model, "--exit-interval", "2", "--save", tmp_path, "--save-interval", "2", model=MODEL)
    own = ("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2", "--log-interval", "1")
    own += ("--eval-iters", "0", "--moe-aux-loss-coeff", "0.05", *STEPS, "--load", str(tmp_path))
    for more in ((), ("--finetune",)):
        given = driver.run(*STEPS, *model, "--load", tmp_path, *more, model=MODEL).losses()
        assert driver.run("--use-checkpoint-args", *more, model=own).losses() == given
    run = driver.run("--use-checkpoint-args", "--norm-epsilon", "1e-5", model=own, expect=1)
    assert "saved as another model: layernorm_epsilon=1e-05 (saved: 0.01); give" in run.text()


@pytest.mark.parametrize("step", [(), ("--ckpt-step", "2")])
def test_use_checkpoint_args_takes_as_much_from_the_older_format(
    driver: Driver, tmp_path: Path, step: tuple[str, ...]
) -> None:
    """It has no `.metadata`, which the driver looked for."""
    model, load = ("--qk-layernorm", "--moe-capacity-factor", "1.5"), ("--ckpt-format", "torch", "--load", tmp_path)
    saved = ("--exit-interval", "2", "--save", tmp_path, "--save-interval", "2", "--ckpt-format", "torch")
    driver.run(*STEPS, *model, *saved, model=MODEL)
    given = driver.run(*STEPS, *model, *load, *step, model=MODEL).losses()
    own = ("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2", "--log-interval", "1")
    own += ("--eval-iters", "0", "--moe-aux-loss-coeff", "0.05", "--use-checkpoint-args")
    assert driver.run(*STEPS, *load, *step, model=own).losses() == given and sorted(given) == [3, 4]


def test_a_checkpoint_that_must_be_there_and_is_not(driver: Driver, checkpoint: Path, tmp_path: Path) -> None:
    line = line_of(driver, *STEPS, "--load", checkpoint, "--ckpt-step", "9")
    assert f"{atomic.folder_of(checkpoint, 9)}: no such checkpoint; {checkpoint} holds those of iterations: 2" in line
    line = line_of(driver, *STEPS, "--load", tmp_path / "none", "--exit-on-missing-checkpoint")
    assert f"{tmp_path / 'none'}: no checkpoint to resume from" in line


@pytest.mark.parametrize("flags", ["", "--save run --save-interval 9"])
def test_a_misspelled_folder_is_not_a_first_start(driver: Driver, tmp_path: Path, flags: str) -> None:
    """Without the weights that --load should give, it trained new ones."""
    folder = tmp_path / "none"
    line = line_of(driver, *STEPS, "--load", folder, *flags.split())
    assert f"{folder}: holds no checkpoint; correct --load, or leave it out to start at iteration 0 (only" in line


def test_a_checkpoint_that_is_named_itself_is_not_taken_for_an_empty_folder(driver: Driver, checkpoint: Path) -> None:
    folder = atomic.folder_of(checkpoint, 2)
    line = line_of(driver, *STEPS, "--load", folder)
    flags = f"--load {checkpoint} --ckpt-step 2"
    assert line.endswith(f"{folder}: is a checkpoint itself; give the folder around it: {flags}")
    assert sorted(driver.run(*STEPS, *flags.split(), model=MODEL).losses()) == [3, 4]


def test_ranks_that_find_different_checkpoints_are_one_line(driver: Driver, checkpoint: Path) -> None:
    fault = [("sees_no_checkpoint", {"rank": 1})]
    flags = (*STEPS, "--load", checkpoint, "--save", checkpoint, "--save-interval", "2")
    run = driver.run(*flags, ranks=2, model=MODEL, faults=fault, expect=1)
    (line,) = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert (
        line.startswith(f"pretrain_gpt: {checkpoint}: rank 0 on ") and " resumes from iteration 2, rank 1 on " in line
    )
    assert line.endswith(" from None: every machine must see one shared folder") and not run.losses()


def test_K7_sigint_saves_and_exits_zero_and_a_second_ends_at_once(driver: Driver, tmp_path: Path) -> None:
    endless = ("--train-iters", "100000", "--save", tmp_path / "run", "--save-interval", "100000")
    with driver.start(*endless, ranks=2, model=MODEL) as run:
        run.wait_for(r"iteration +2/")
        run.signal(1, signal.SIGINT)
        assert run.wait() == [0, 0], run.text()[-3000:]
    assert "interrupted: saving after this iteration" in run.text(1)
    latest = atomic.find_latest_complete(tmp_path / "run")
    assert latest.iteration == max(run.losses()) and not latest.warnings

    second = {"rank": 0, "step": latest.iteration + 3, "number": int(signal.SIGINT)}  # in both of its micro-batches
    with driver.start(*endless, "--load", tmp_path / "run", model=MODEL, faults=[("signal_self", second)]) as run:
        assert run.wait() == [-signal.SIGINT]
    assert atomic.find_latest_complete(tmp_path / "run") == latest and "Traceback" not in run.text()


@pytest.mark.parametrize("core", ["core", "_core"])
def test_a_random_state_of_any_numpy_loads(core: str) -> None:
    import numpy as np
    import torch

    from megablocks.megatron import checkpoint_io

    checkpoint_io.restrict_unpickling()
    state, saved, renamed = np.arange(4, dtype=np.uint32), io.BytesIO(), io.BytesIO()
    torch.save(state, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(renamed, "w") as target:
        for name in source.namelist():
            raw = source.read(name)
            target.writestr(name, re.sub(rb"numpy\._?core\.", f"numpy.{core}.".encode(), raw))
    renamed.seek(0)
    assert np.array_equal(torch.load(renamed), state)


class Evil:
    """Unpickled without restriction, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


RESUME, FLAGS = (), ("--use-checkpoint-args",)


@pytest.mark.parametrize(
    ("place", "flags"),
    [(".metadata", RESUME), ("object", RESUME), ("tensor", RESUME), (".metadata", FLAGS), ("object", FLAGS)],
)
def test_a_malicious_pickle_runs_nothing_and_is_named(
    driver: Driver, checkpoint: Path, tmp_path: Path, place: str, flags: tuple[str, ...]
) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    shutil.copytree(checkpoint, tmp_path / "run")
    folder = atomic.folder_of(tmp_path / "run", 2)
    evil, name = Evil(tmp_path / "was here"), ".metadata"
    if place == ".metadata":
        (folder / name).write_bytes(pickle.dumps(evil))
    else:
        metadata = FileSystemReader(folder).read_metadata()
        wanted = "common_state" if place == "object" else "embedding.word_embeddings"
        (entry,) = (info for index, info in metadata.storage_data.items() if index.fqn.startswith(wanted))
        name = entry.relative_path
        entry.offset = (folder / name).stat().st_size
        with open(folder / name, "ab") as file:
            torch.save(evil, file)
        entry.length = (folder / name).stat().st_size - entry.offset
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    hashes = atomic.hash_files(folder, atomic.files_of(folder))
    atomic.mark_complete(folder, 2, hashes)  # who forges a checkpoint forges its manifest too
    line = line_of(driver, *STEPS, "--load", tmp_path / "run", *flags)
    assert f"{folder / name}: holds posix.mkdir, which Megatron does not put there" in line
    assert not (tmp_path / "was here").exists()
