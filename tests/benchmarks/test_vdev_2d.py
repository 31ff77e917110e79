"""The peer over NVSHMEM computes our layer. Its two ops are replaced by gloo's all-to-all with the same contract."""

import importlib

import pytest
import torch
import torch.distributed as dist

from megablocks.testing.launcher import run_distributed_test

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path
from .peer_layers import HIDDEN, TOKENS, TOP_K, errors_of, our_layer
from .test_measure import run_script

vdev_2d = importlib.import_module("vdev_2d")

pytestmark = pytest.mark.xdist_group("ranks")
WORLD = 2


def exchange_rows(rows: torch.Tensor, send: torch.Tensor, receive: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(int(receive.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows, receive.tolist(), send.tolist())
    return out


class Gloo:
    """The contract of torch's ops, as their docstrings give it. Memory that nobody wrote is NaN or -1."""

    def empty(self, *shape, dtype):
        return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)

    def dispatch(self, input, out, in_splits, out_splits_offsets):
        splits = in_splits.view(WORLD, -1)
        arrived = torch.empty_like(splits)
        dist.all_to_all_single(arrived, splits)
        rows = exchange_rows(input[: int(splits.sum())], splits.sum(1), arrived.sum(1))
        chunks = rows.split(arrived.flatten().tolist())  # by rank and expert
        at, align = 0, vdev_2d.ALIGN
        for expert in range(splits.shape[1]):
            begin = at
            for rank in range(WORLD):
                chunk = chunks[rank * splits.shape[1] + expert]
                out[at : at + len(chunk)] = chunk
                out_splits_offsets[:, expert * WORLD + rank] = torch.tensor([len(chunk), at])
                at += len(chunk)
            at = begin + max(align, (at - begin + align - 1) // align * align)

    def combine(self, input, out, in_splits_offsets, out_splits_offsets):
        splits, offsets = in_splits_offsets.view(2, -1, WORLD).transpose(1, 2)  # by rank and expert
        arrived = torch.empty_like(splits.contiguous())
        dist.all_to_all_single(arrived, splits.contiguous())
        chunks = [input[o : o + n] for n, o in zip(splits.flatten(), offsets.flatten(), strict=True)]
        rows = exchange_rows(torch.cat(chunks), splits.sum(1), arrived.sum(1))
        out[: len(rows)] = rows
        ends = arrived.flatten().cumsum(0)
        out_splits_offsets.copy_(torch.stack([arrived.flatten(), ends - arrived.flatten()]))


def compare(experts: int) -> tuple[dict[str, float], int]:
    """Errors of the second step, which finds the rows of the first in the buffers, and the number of groups."""
    ours = our_layer(experts)
    sizes = vdev_2d.Sizes(WORLD, experts // WORLD, TOKENS * TOP_K, HIDDEN, 2.0)
    theirs = vdev_2d.Layer(ours, vdev_2d.Exchange(Gloo(), sizes, torch.float32, torch.device("cpu")))
    errors = [errors_of(ours, theirs, step) for step in range(2)]
    return errors[1], sizes.groups


# 20 experts a rank go in two groups, and some of them get no pair
@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch's grouped_mm is not public yet")
@pytest.mark.parametrize("experts, groups", [(8, 1), (40, 2)])
def test_the_peer_computes_our_layer(experts: int, groups: int) -> None:
    for errors, found in run_distributed_test(compare, WORLD, experts):
        assert found == groups and set(errors) == {"y", "dx", "w1", "v1", "w2", "router"}
        assert all(error <= 1e-5 for error in errors.values()), errors


def overfill() -> str:
    sizes = vdev_2d.Sizes(WORLD, 4, TOKENS * TOP_K, HIDDEN, 1.0)
    exchange = vdev_2d.Exchange(Gloo(), sizes, torch.float32, torch.device("cpu"))
    exchange.check(torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % 8)  # an even load fits
    try:
        exchange.check(torch.full((TOKENS, TOP_K), dist.get_rank()))  # rank 0 gets all
    except ValueError as error:
        return str(error)
    return ""


def test_rows_that_do_not_fit_are_refused_on_every_rank() -> None:
    # 48 rows for each of two experts, and 8 of alignment for each of the other two
    assert run_distributed_test(overfill, WORLD) == ["rows_factor=1: a buffer of 88 rows would take 112; raise it"] * 2


def test_a_dry_run_lists_the_arms(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert run_script("expert_parallel", monkeypatch, "--peer", "vdev_2d", "--cases", "Mixtral") is None
    assert capsys.readouterr().out.splitlines()[1:] == list(vdev_2d.ARMS)
