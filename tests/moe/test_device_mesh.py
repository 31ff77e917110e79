"""torch's own way to train over ranks: experts as DTensors of a mesh, FSDP2 around the rest, torch's checkpoints."""

import dataclasses
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from megablocks import MoEConfig
from megablocks.layers import Arguments
from megablocks.layers.dmoe import dMoE as OldDMoE
from megablocks.layers.moe import MoE as OldMoE
from megablocks.layers.moe import batched_load_balancing_loss, clear_load_balancing_loss
from megablocks.moe import MoE, dMoE
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import relative_error

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all

TOLERANCE = 1e-5
SHARES = 4  # of a batch, over however many ranks
STEPS, SAVED = 10, 5
CONFIG = MoEConfig(
    hidden_size=12, ffn_hidden_size=20, num_experts=4, top_k=2, activation="swiglu", mlp_bias=True, output_bias=True,
    shared_expert_hidden_size=8, load_balancing_loss_weight=0.1, z_loss_weight=0.01, init_std=0.3,
)  # fmt: skip
ARGUMENTS = Arguments(
    hidden_size=12, ffn_hidden_size=64, num_layers=2, moe_num_experts=4, moe_top_k=2, moe_capacity_factor=0, fp16=False,
    device="cpu", bias=False, return_bias=False, mlp_type="glu", init_method=partial(nn.init.normal_, std=0.3),
)  # fmt: skip


class Model(nn.Module):
    """Two layers: a dropless one, and one that computes as many places for every expert."""

    def __init__(self, *layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)

    def forward(self, x):
        losses = 0.0
        for block in self.blocks:
            x, loss = block(x)
            losses = losses + loss
        if not hasattr(self.blocks[0].layer, "forward_with_aux"):
            losses = batched_load_balancing_loss(ARGUMENTS)
            clear_load_balancing_loss()
        return x, losses


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.linear, self.layer = nn.Linear(12, 12), layer

    def forward(self, x):
        inner = torch.relu(self.linear(x))
        if not hasattr(self.layer, "forward_with_aux"):
            return x + self.layer(inner), 0.0
        y, aux = self.layer.forward_with_aux(inner)
        return x + y, sum(aux.losses.values())


def model_of(expert_mesh=None):
    torch.manual_seed(0)
    padded = CONFIG.replace(capacity_factor=0)
    return Model(dMoE(CONFIG, expert_mesh=expert_mesh), MoE(padded, expert_mesh=expert_mesh))


def sharded(replicas, ranks, compiled=False):
    """The model over replicas × ranks processes; the experts' parameters are spread over both."""
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicas", "experts"))
    model = model_of(mesh["experts"] if ranks > 1 else None)
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager")
        if ranks > 1:
            fully_shard(block.layer.experts, mesh=mesh["replicas"])
        fully_shard(block)
    return fully_shard(model)


def loss_of(model, step, index):
    draw = torch.Generator().manual_seed(100 * step + index)
    x, target = torch.randn(5, 12, generator=draw), torch.randn(5, 12, generator=draw)
    y, losses = model(x)
    return (y - target).square().mean() + losses


def whole(name, t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


def train(model, steps, optimizer=None, whole=whole):
    """Mean losses of the steps, the gradients of the last, and the parameters; each rank takes its part of SHARES."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    parameters = dict(model.named_parameters())
    optimizer = optimizer or torch.optim.AdamW(parameters.values(), lr=1e-2)
    losses, gradients = [], {}
    for step in steps:
        optimizer.zero_grad()
        mean = torch.stack([loss_of(model, step, i) for i in range(rank, SHARES, world)]).mean()
        mean.backward()
        gradients = {name: whole(name, p.grad) for name, p in parameters.items()}
        optimizer.step()
        total = mean.detach() / world
        if world > 1:
            dist.all_reduce(total)
        losses.append(total)
    return torch.stack(losses), gradients, {name: whole(name, p) for name, p in parameters.items()}


def compare(found, expected):
    (losses, *tensors), (expected_losses, *expected_tensors) = found, expected
    assert relative_error(losses, expected_losses[-len(losses) :]) < TOLERANCE
    for mine, theirs in zip(tensors, expected_tensors, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert relative_error(mine[name], theirs[name]) < TOLERANCE, name


@pytest.fixture(scope="module")
def one_process():
    return train(model_of(), range(STEPS))


def _train(replicas, ranks, saved=None):
    """Train, save what half of the steps gave in the folder `saved`, and train on."""
    model = sharded(replicas, ranks)
    if saved is None:
        return train(model, range(STEPS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, range(SAVED), optimizer)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=saved)
    return train(model, range(SAVED, STEPS), optimizer)


def _resume(model, saved):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, range(SAVED, STEPS), optimizer)


def _resume_sharded(replicas, ranks, saved):
    return _resume(sharded(replicas, ranks), saved)


def test_E5_fsdp2_alone_equals_one_process(one_process):
    for found in run_distributed_test(_train, 2, 2, 1):
        compare(found, one_process)


def test_E5_fsdp2_and_spread_experts_equal_one_process(one_process, tmp_path):
    """Over 2 × 2 processes, from whose checkpoint 1 × 2 processes and one process go on."""
    for found in run_distributed_test(_train, 4, 2, 2, str(tmp_path)):
        compare(found, one_process)
    for found in run_distributed_test(_resume_sharded, 2, 1, 2, str(tmp_path)):
        compare(found, one_process)
    compare(_resume(model_of(), str(tmp_path)), one_process)


def _train_compiled():
    """Both ranks do the same, so one compiles, which takes 15 s. The other one runs eagerly."""
    return train(sharded(1, 2, compiled=dist.get_rank() == 1), range(STEPS))


def test_N9_compiled_blocks_with_spread_experts_equal_one_process(one_process):
    for found in run_distributed_test(_train_compiled, 2):
        compare(found, one_process)


def old_model(bias, **arguments):
    """`bias` only in the second layer."""
    torch.manual_seed(0)
    args = dataclasses.replace(ARGUMENTS, **arguments)
    return Model(OldDMoE(args), OldMoE(dataclasses.replace(args, bias=bias)))


def _as_dtensors(mlp, mesh, placements):
    for name, p in list(mlp.named_parameters()):
        mlp.register_parameter(name, nn.Parameter(DTensor.from_local(p.data, mesh, placements, run_check=False)))


def _train_in(wrapper):
    """Experts of `Arguments` as llm-foundry makes DTensors of them: in FSDP2, or in DDP as in its own tests."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("weight_parallel", "expert_parallel"))
    replicas, group = mesh["weight_parallel"], mesh["expert_parallel"].get_group()
    model = old_model(wrapper == "fsdp2", moe_expert_model_parallelism=True, expert_parallel_group=group)
    for block in model.blocks:
        layer, mlp = block.layer, block.layer.experts.mlp
        if wrapper == "fsdp2":
            _as_dtensors(mlp, mesh["expert_parallel"], [Shard(0)])
            # the layer's bias belongs to all ranks, so only the matrices are cut over the replicas
            fully_shard(layer.experts if layer.experts.bias is None else mlp, mesh=replicas)
        else:
            _as_dtensors(mlp, mesh, [Replicate(), Shard(0)])
            _pre_dp_module_transform(mlp)
            layer.experts = DistributedDataParallel(layer.experts, process_group=replicas.get_group())
            layer.router, block.linear = map(DistributedDataParallel, (layer.router, block.linear))
    if wrapper == "fsdp2":
        return train(fully_shard(model), range(STEPS))

    def gather(name, t):
        if ".mlp." not in name:
            return whole(name, t)
        parts = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(parts, t.detach().contiguous(), group=group)
        return torch.cat(parts)

    losses, *tensors = train(model, range(STEPS), whole=gather)
    return losses, *({name.replace("module.", ""): t for name, t in named.items()} for named in tensors)


def _train_as_foundry():
    return {wrapper: _train_in(wrapper) for wrapper in ("fsdp2", "ddp")}


def test_E5_arguments_on_the_mesh_of_llm_foundry_equal_one_process():
    expected = {wrapper: train(old_model(wrapper == "fsdp2"), range(STEPS)) for wrapper in ("fsdp2", "ddp")}
    for found in run_distributed_test(_train_as_foundry, 4):
        for wrapper in expected:
            compare(found[wrapper], expected[wrapper])


def _draw_late(replicas, ranks):
    """Parameters that are made without memory, cut, and then drawn or loaded; and what a bad mesh raises."""
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicas", "experts"))
    experts = dMoE(CONFIG, expert_mesh=mesh["experts"], device="meta").experts
    fully_shard(experts, mesh=mesh["replicas"]).to_empty(device="cpu")
    experts.reset_parameters(seed=7)
    drawn = {name: whole(name, p) for name, p in experts.named_parameters()}
    plain = dMoE(CONFIG, seed=8).experts.state_dict()
    set_model_state_dict(experts, plain, options=StateDictOptions(full_state_dict=True))
    loaded = {name: whole(name, p) for name, p in experts.named_parameters()}
    errors = []
    for options in (
        dict(expert_mesh=mesh),
        dict(expert_mesh=mesh["experts"], expert_parallel_group=dist.group.WORLD),
        dict(config=CONFIG.replace(num_experts=2, top_k=1), expert_mesh=mesh._flatten()),
    ):
        with pytest.raises(ValueError) as error:
            dMoE(**{"config": CONFIG, **options})
        errors.append(str(error.value))
    return (drawn, loaded), errors


def test_experts_are_drawn_and_loaded_where_they_lie():
    expected = [dict(dMoE(CONFIG, seed=seed).experts.named_parameters()) for seed in (7, 8)]
    for found, errors in run_distributed_test(_draw_late, 4, 2, 2):
        for mine, plain in zip(found, expected, strict=True):
            assert mine.keys() == plain.keys() and all(torch.equal(mine[name], plain[name]) for name in plain)
        assert errors == [
            "expert_mesh: has 2 dimensions, must have one; select one, such as mesh['experts']",
            "expert_parallel_group: must be left out with expert_mesh, which has a group",
            "expert_mesh: has 4 ranks, must have at most one per expert, 2",
        ]


def _run_page(page):
    """The page's examples, in this process group. Behind the second stands the norm of clipped gradients."""
    train_file, clip = re.findall(r"(?ms)^```python fragment\n(.+?)^```", page)
    names = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*view tensor")  # FSDP2's, about gradients that may be wrong
        exec(train_file.replace("dist.init_process_group()\n", ""), names)
    model, tokens = names["model"], names["tokens"]
    later = (model(tokens) - tokens).square().mean()
    (1e4 * later).backward()
    exec(clip, names)
    return names["loss"].item(), later.item(), [whole(name, p.grad) for name, p in model.named_parameters()]


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs/torch_native.md").read_text()
    for loss, later, gradients in run_distributed_test(_run_page, 2, page):
        assert 0 < later < loss
        assert relative_error(torch.cat([g.flatten() for g in gradients]).norm(), torch.tensor(1.0)) < TOLERANCE
