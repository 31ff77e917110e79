"""What the guard counts in a step, and in which steps the host reads it; tests/reliability has it in whole runs."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training")

from megablocks.megatron import guards as module  # noqa: E402
from megablocks.megatron.checkpoints import Checkpoints  # noqa: E402
from megablocks.megatron.guards import Guards  # noqa: E402
from megablocks.monitor.guards import LossWindow, NonFiniteError  # noqa: E402


def guards_of(defers: bool = True, **changes: Any) -> Guards:
    values: dict[str, Any] = dict(
        curr_iteration=0, log_interval=100, save_interval=None, exit_interval=None, train_iters=100, fp16=False,
        clip_grad=1.0, megablocks_nonfinite_guard=True, megablocks_loss_spike_factor=3.0,
        megablocks_loss_spike_window=8,
    )  # fmt: skip
    found = Guards(argparse.Namespace(**{**values, **changes}))
    found._defers = defers
    return found


def counted(guards: Guards, norm: Any = None) -> list[float]:
    """The sums of a step whose micro-batch has a loss of 2.5 for each of four tokens."""
    guards.observe(torch.tensor(10.0), torch.tensor(4))
    guards._step(lambda: (True, torch.tensor(1.0) if norm is None else norm, None))
    return guards._unread[-1][1].tolist()


def test_N3_any_loss_that_is_not_finite_counts_and_spoils_no_sum() -> None:
    for guards in (guards_of(), guards_of(fp16=True)):
        for loss in (math.nan, math.inf, -math.inf):
            guards.observe(torch.tensor(loss), torch.tensor(4))
        assert counted(guards) == [10, 16, 3, 0] and guards._bad
    assert counted(guards_of()) == [10, 4, 0, 0]


@pytest.mark.parametrize("norm", [math.inf, math.nan, torch.tensor(math.inf), torch.tensor([math.nan])])
def test_N3_a_norm_that_is_not_finite_counts_after_the_update(norm: Any) -> None:
    guards, fp16 = guards_of(), guards_of(fp16=True)
    assert counted(guards, norm)[2:] == [0, 1] and guards._bad
    assert counted(fp16, norm)[2:] == [0, 0] and not fp16._bad  # its scaler expects overflows


@pytest.mark.parametrize("bad", ["buffers", "expert_parallel_buffers"])
def test_N3_gradients_are_looked_at_where_no_norm_shows_them(bad: str) -> None:
    whole, hurt = (SimpleNamespace(grad_data=torch.tensor([1.0, value])) for value in (2.0, math.nan))
    chunk: Any = SimpleNamespace(buffers=[whole], expert_parallel_buffers=[whole])
    setattr(chunk, bad, [whole, hurt])
    for clip_grad, found in ((1.0, 0), (0.0, 1)):
        guards = guards_of(clip_grad=clip_grad)
        guards._model = [chunk]
        assert counted(guards)[3] == found


def test_the_host_reads_before_all_that_keeps_or_ends() -> None:
    intervals = {"log_interval": 6, "save_interval": 4, "exit_interval": 5, "train_iters": 7}
    assert [step for step in range(1, 8) if guards_of(**intervals)._reads_in(step)] == [4, 5, 6, 7]
    assert all(guards_of(defers=False)._reads_in(step) for step in range(1, 8))


def test_F4_a_spike_is_a_mean_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dist, "all_reduce", lambda table: table.add_(torch.tensor([30.0, 4, 0, 0])))
    monkeypatch.setattr(module, "print_rank_0", lambda _: None)
    guards = guards_of()
    for _ in range(4):
        counted(guards)
    assert not guards.read() and guards.window.median() == 5.0, "of both ranks"
    guards.observe(torch.tensor(400.0), torch.tensor(4))
    guards._step(lambda: (True, torch.tensor(1.0), None))
    assert guards.read()


def test_F3_every_save_reads_the_guard_first() -> None:
    """One that a signal asks for too, in a step that would not read it."""

    def read() -> None:
        raise NonFiniteError("step 3")

    saved: list[int] = []
    args = argparse.Namespace(save="folder", ckpt_format="torch")
    with pytest.raises(NonFiniteError):
        Checkpoints(args, None, LossWindow(4, 0), read)._save(saved.append, 3)
    assert not saved
