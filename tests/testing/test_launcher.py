"""The launcher itself: results by rank, the first failing rank's traceback, dead and hanging ranks."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megablocks.testing.launcher import RankFailed, run_distributed_test

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all


def _sum_of_ranks(scale):
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return dist.get_rank(), total


def _fail_on_one():
    if dist.get_rank() == 1:
        raise KeyError("the broken one")
    dist.barrier()


def _die_on_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on_one():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def test_results_come_back_by_rank():
    results = run_distributed_test(_sum_of_ranks, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 30.0 for _, total in results)


@pytest.mark.parametrize(
    "fn, message",
    [(_fail_on_one, r"rank 1 failed:\n(.|\n)*the broken one"), (_die_on_one, r"rank 1 died|rank 0 failed")],
)
def test_first_failure_is_named(fn, message):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        run_distributed_test(fn, 2)
    assert time.monotonic() - started < 450, "the other rank was not stopped"


def test_a_hanging_rank_is_named():
    with pytest.raises(RankFailed, match=r"did not finish|failed"):
        run_distributed_test(_hang_on_one, 2, timeout=6)
