"""The peer LigerCute computes our layer. Its op is replaced by dense products over gathered weights."""

import importlib

import pytest
import torch
import torch.distributed as dist

from megablocks.testing.launcher import run_distributed_test

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path
from .peer_layers import errors_of, our_layer
from .test_measure import run_script

liger_cute = importlib.import_module("liger_cute")

pytestmark = pytest.mark.xdist_group("ranks")
WORLD, EXPERTS = 2, 8


class Gather(torch.autograd.Function):
    """The weights (E', …) of all ranks as one; backward sums over the ranks."""

    @staticmethod
    def forward(ctx, weight):
        every = [torch.empty_like(weight) for _ in range(WORLD)]
        dist.all_gather(every, weight)
        return torch.cat(every)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(WORLD)[dist.get_rank()]


def moe_fused(x, expert, weight, gate, up, down, num_experts, top_k):
    """The op's contract: gate and up (E', I, H), down (E', H, I), gradients summed over the ranks."""
    assert expert.dtype == torch.int32 and expert.shape == weight.shape == (len(x), top_k)
    gate, up, down = (Gather.apply(w) for w in (gate, up, down))
    assert len(gate) == num_experts
    hidden = torch.nn.functional.silu(torch.einsum("th,eih->tei", x, gate)) * torch.einsum("th,eih->tei", x, up)
    rows = torch.einsum("tei,ehi->teh", hidden, down)
    return (rows.gather(1, expert.long().unsqueeze(2).expand(-1, -1, x.shape[1])) * weight.unsqueeze(2)).sum(1)


def compare() -> dict[str, float]:
    ours = our_layer(EXPERTS)
    return errors_of(ours, liger_cute.Layer(ours, moe_fused))


def test_the_peer_computes_our_layer() -> None:
    for errors in run_distributed_test(compare, WORLD):
        assert all(error <= 1e-5 for error in errors.values()), errors


def test_a_dry_run_lists_the_arms(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert run_script("expert_parallel", monkeypatch, "--peer", "liger_cute", "--cases", "Mixtral") is None
    assert capsys.readouterr().out.splitlines()[1:] == list(liger_cute.ARMS)
