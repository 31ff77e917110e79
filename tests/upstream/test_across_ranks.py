"""Over ranks: the all-to-all of megablocks 0.10's signature, its shards, and its classes against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megablocks.layers import Arguments, mpu
from megablocks.layers.all_to_all import all_to_all
from megablocks.layers.dmoe import ParallelDroplessMLP, dMoE
from megablocks.layers.moe import ParallelMLP
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import relative_error

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all

SPLITS = [[2, 0], [3, 1]]  # rows from rank i to rank j


def _exchange(async_op, group_given):
    rank = dist.get_rank()
    send, receive = SPLITS[rank], [SPLITS[other][rank] for other in range(2)]
    x = torch.arange(float(sum(send))).view(-1, 1).add(10 * rank).requires_grad_()
    out, handle = all_to_all(x, receive, send, dist.group.WORLD if group_given else None, async_op=async_op)
    assert (handle is not None) == async_op
    if handle is not None:
        handle.wait()
    (out * torch.arange(1.0, 1 + sum(receive)).view(-1, 1)).sum().backward()
    with pytest.raises(ValueError, match="x: has|must add up to"):
        all_to_all(x, receive, [9, 9], dist.group.WORLD, async_op=async_op)
    return out.flatten().tolist(), x.grad.flatten().tolist()


@pytest.mark.parametrize("async_op, group_given", [(False, True), (True, True), (True, False)])
def test_all_to_all_and_its_gradient(async_op, group_given):
    (first, first_grad), (second, second_grad) = run_distributed_test(_exchange, 2, async_op, group_given)
    assert first == [0.0, 1.0, 10.0, 11.0, 12.0] and second == [13.0]
    assert first_grad == [1.0, 2.0] and second_grad == [3.0, 4.0, 5.0, 1.0]


def _shares(experts):
    args = Arguments(
        hidden_size=12, ffn_hidden_size=64, moe_num_experts=experts, moe_top_k=2, fp16=False, device="cpu", bias=False,
        moe_capacity_factor=0,
    )  # fmt: skip
    found = []
    for kind in (ParallelMLP, ParallelDroplessMLP):
        torch.manual_seed(0)
        args.moe_expert_model_parallelism = True
        spread = kind(args)
        sizes = mpu.experts_per_rank(args), mpu.features_per_rank(args)
        torch.manual_seed(0)
        args.moe_expert_model_parallelism = False
        whole = kind(args)
        draw = torch.Generator().manual_seed(dist.get_rank())
        x, weights = torch.randn(3, 2, 12, generator=draw), torch.rand(6, 2, generator=draw)
        scores, ids = torch.rand(6, experts, generator=draw), torch.randint(0, experts, (6, 2), generator=draw)
        y, expected = spread(x, scores, weights, ids), whole(x, scores, weights, ids)
        y.square().sum().backward()
        expected.square().sum().backward()
        # a whole expert's gradient is the mean over the ranks of theirs; the share here is a slice of it
        everything = whole.mlp.w2.grad.clone().view(experts, 64, 12)
        dist.all_reduce(everything)
        local, width = sizes
        rank, blocks = dist.get_rank(), experts // local
        first, start = rank % blocks * local, rank // blocks * width
        share = everything[first : first + local, start : start + width] / dist.get_world_size()
        marks = {mpu.param_is_expert_model_parallel(p) for p in spread.mlp.parameters()}
        errors = relative_error(y, expected), relative_error(spread.mlp.w2.grad.view(share.shape), share)
        found.append((sizes, max(errors), marks, tuple(spread.mlp.w1.shape)))
    return found


@pytest.mark.parametrize("ranks, experts, sizes", [(2, 4, (2, 64)), (4, 2, (1, 32))])
def test_N8_classes_share_the_experts(ranks, experts, sizes):
    """In blocks of experts, or with more ranks than experts in slices of their width."""
    for found in run_distributed_test(_shares, ranks, experts):
        for (held, error, marks, shape), capacity_layout in zip(found, (True, False), strict=True):
            assert held == sizes and error < 1e-5 and marks == {True}
            local, width = sizes
            assert shape == ((local, 12, width) if capacity_layout else (local * width, 12))


def _as_dtensors(mlp_type):
    """A layer whose experts are DTensors on llm-foundry's mesh, and the same layer with plain parameters."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("weight_parallel", "expert_parallel"))
    args = Arguments(
        hidden_size=12, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, fp16=False, device="cpu", bias=False,
        mlp_type=mlp_type, moe_expert_model_parallelism=True, expert_parallel_group=mesh["expert_parallel"].get_group(),
    )  # fmt: skip
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(dist.get_rank()))
    outputs, gradients = [], []
    for distributed in (False, True):
        torch.manual_seed(0)
        layer = dMoE(args)
        mlp = layer.experts.mlp
        if distributed:
            for name, p in list(mlp.named_parameters()):
                weight = DTensor.from_local(p.detach(), mesh, [Replicate(), Shard(0)])
                setattr(mlp, name, torch.nn.Parameter(weight))
        y = layer(x)
        y.square().sum().backward()
        outputs.append(y.detach())
        gradients.append([p.grad.to_local() if distributed else p.grad for p in mlp.parameters()])
    return outputs, gradients


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_spread_experts_may_be_dtensors(mlp_type):
    for (plain, distributed), gradients in run_distributed_test(_as_dtensors, 2, mlp_type):
        assert torch.equal(plain, distributed)
        for a, b in zip(*gradients, strict=True):
            assert a.any() and torch.equal(a, b)
