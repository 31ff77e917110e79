"""Whole layers with experts spread over ranks: gradients, losses and capacities against one float64 process."""

import copy
import dataclasses
import io
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from megablocks import moe
from megablocks.layers import Arguments, MoE, dMoE
from megablocks.layers.mpu import is_moe_param
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty

from .harness import KINDS, batch, build, config_of, fill, parameters_of

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all

TOLERANCE = 1e-5


def _run_rank(kind, config, counts, kwargs):
    """Loss of a rank: mean over its tokens, plus its auxiliary losses. Replicated gradients are averaged as in DDP."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    # drawn on the CPU, as the expected ones are: a GPU's generator draws others under the same seed
    layer = build(kind, config, expert_parallel_group=dist.group.WORLD, **kwargs).to(device)
    x, dy = (t.to(device) for t in batch(config, counts[rank], seed=rank))
    x.requires_grad_()
    with poisoned_empty(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of torch's collectives
        y, aux = layer.forward_with_aux(x)
        ((y * dy).sum() / max(counts[rank], 1) + sum(aux.losses.values())).backward()
    router = layer.router.layer.weight.grad
    dist.all_reduce(router)
    router /= dist.get_world_size()
    grads = {name: p.grad for name, p in layer.experts.named_parameters()}
    losses = {name: loss.detach() for name, loss in aux.losses.items()}
    shard = dataclasses.astuple(layer.experts.shard)
    return tree_map_only(
        torch.Tensor, torch.Tensor.cpu, (y.detach(), x.grad, router, grads, losses, aux.metrics, shard)
    )


def _run_kinds(kinds, counts):
    return [_run_rank(kind, config_of(kind), counts, {}) for kind in kinds]


def _drop(config, ids, counts):
    """Ids of each rank with -1 for what the rule drops, places handed out rank by rank, token by token."""
    if not config.capacity_factor:
        return ids, None
    if config.capacity_rule == "megablocks":
        places = int(config.capacity_factor * config.top_k * sum(counts) / config.num_experts)
    else:
        places = config.top_k * int(abs(config.capacity_factor) * math.ceil(max(counts) / config.num_experts))
    kept, taken = [], [0] * config.num_experts
    for of_rank in ids:
        if config.capacity_rule == "tutel":
            taken = [0] * config.num_experts
        of_rank = of_rank.clone()
        for choice in of_rank.view(-1).split(1):
            e = int(choice)
            if taken[e] >= places:
                choice.fill_(-1)
            taken[e] += 1
        kept.append(of_rank)
    return kept, places


def _expected(kind, config, counts):
    layer = build(kind, config)
    parameters = parameters_of(layer)
    gate = parameters["router.layer.weight"]
    batches = [tuple(t.double() for t in batch(config, tokens, seed=rank)) for rank, tokens in enumerate(counts)]
    xs = [x.requires_grad_() for x, _ in batches]
    scores = [(x @ gate.t()).softmax(1) for x in xs]
    chosen = [s.topk(config.top_k, dim=1) for s in scores]
    ids, _ = _drop(config, [c.indices for c in chosen], counts)
    inner = {n.removeprefix("experts."): p for n, p in parameters.items() if n.startswith("experts.")}
    ys, losses, total = [], [], 0.0
    for rank, (x, dy) in enumerate(batches):
        tokens = max(counts[rank], 1)
        token = torch.arange(counts[rank]).repeat_interleave(config.top_k)
        y = experts_oracle(
            x, token, ids[rank].flatten(), chosen[rank].values.flatten(), inner, config.num_experts, config.activation
        )
        load = torch.bincount(chosen[rank].indices.flatten(), minlength=config.num_experts).double()
        balance = config.num_experts / (config.top_k * tokens**2) * (load * scores[rank].sum(0)).sum()
        z = (x @ gate.t()).logsumexp(1).square().sum() / tokens
        loss = {
            "load_balancing_loss": config.load_balancing_loss_weight * balance,
            "z_loss": config.z_loss_weight * z,
        }
        total = total + (y * dy).sum() / tokens + sum(loss.values())
        ys.append(y.detach())
        losses.append({name: value.detach() for name, value in loss.items()})
    total.backward()
    world = len(counts)
    grads = {name: p.grad / world for name, p in inner.items()}
    dropped = [int((of_rank < 0).sum()) for of_rank in ids]
    return ys, [x.grad for x in xs], gate.grad / world, grads, losses, dropped


def _compare(kind, config, counts, expert_scale=1.0, **kwargs):
    results = run_distributed_test(_run_rank, len(counts), kind, config, counts, kwargs)
    _check(results, kind, config, counts, expert_scale)


def _check(results, kind, config, counts, expert_scale=1.0):
    ys, dxs, router, grads, losses, dropped = _expected(kind, config, counts)
    for rank, (y, dx, router_grad, expert_grads, rank_losses, metrics, shard) in enumerate(results):
        assert relative_error(y, ys[rank]) < TOLERANCE
        assert relative_error(dx, dxs[rank]) < TOLERANCE
        assert relative_error(router_grad, router) < TOLERANCE
        assert metrics["dropped"] == dropped[rank]
        for name, loss in losses[rank].items():
            assert relative_error(rank_losses[name], loss) < TOLERANCE, name
        offset, local, ffn_rank, ffn_size = shard
        for name, grad in expert_grads.items():
            wanted = grads[name].view(config.num_experts, -1, grads[name].shape[-1])[offset : offset + local]
            if name in ("w1", "v1", "w2"):
                wanted = wanted.chunk(ffn_size, dim=1)[ffn_rank]
            assert relative_error(grad.reshape(wanted.shape), wanted * expert_scale) < TOLERANCE, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_N8_N7_gradients_and_losses_equal_plain_data_parallel(kind, world):
    _compare(kind, config_of(kind), (5,) * world)


@pytest.mark.parametrize("kind, counts", [("grouped", (4, 9)), ("batched", (4, 0, 9, 2))])
@pytest.mark.parametrize("top_k", [3, 8])
def test_N8_N7_a_token_with_several_experts_on_a_rank(kind, counts, top_k):
    """Top-k up to every expert: the ranks send sums over their experts, and the losses count each pair."""
    _compare(kind, config_of(kind, num_experts=8, top_k=top_k), counts)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("counts", [(5, 5), (3, 11), (0, 6)])
def test_N8_R3_R4_over_nccl(counts):
    """Every kind in one group, each with its tokens exchanged between two GPUs."""
    for kind, *results in zip(KINDS, *run_distributed_test(_run_kinds, 2, KINDS, counts, backend="nccl"), strict=True):
        _check(results, kind, config_of(kind), counts)


def _output_and_gradients(config):
    layer = build(config.mlp_impl, config, expert_parallel_group=dist.group.WORLD)
    x, dy = batch(config, 7, seed=dist.get_rank())
    x.requires_grad_()
    y, aux = layer.forward_with_aux(x)
    ((y * dy).sum() + sum(aux.losses.values())).backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_N6_every_path_computes_the_same_across_ranks():
    config = config_of("sparse")
    results = {
        impl: run_distributed_test(_output_and_gradients, 2, config.replace(mlp_impl=impl))
        for impl in ("reference", "grouped", "sparse", "scatter", "fused")
    }
    for impl in ("grouped", "sparse", "scatter", "fused"):
        for actual, wanted in zip(sum(results[impl], []), sum(results["reference"], []), strict=True):
            assert relative_error(actual, wanted) < 1e-6, impl


def _errors_of_quantizers(config):
    """By quantizer, the relative error of output, dx, and the gradients of router, w1, v1 and w2."""
    plain = _output_and_gradients(config)
    errors = {}
    for name in ("inputs", "rematerialize", "scatter"):
        quantized = _output_and_gradients(config.replace(**{f"quantize_{name}_num_bits": 8}))
        errors[name] = [relative_error(a, b) for a, b in zip(quantized, plain, strict=True)]
    return errors


def test_N1_quantized_gradients_are_near_across_ranks():
    config = config_of("sparse", mlp_impl="grouped", mlp_bias=False)
    touched = {"inputs": (3, 4), "rematerialize": (1, 3, 4, 5), "scatter": (1, 2)}  # dx passes through the router
    for errors in run_distributed_test(_errors_of_quantizers, 2, config):
        for name, values in errors.items():
            assert values[0] == 0
            for i, error in enumerate(values):
                assert (1e-5 < error < 2e-2) if i in touched[name] else error == 0, (name, values)


def test_N8_a_scale_of_one_leaves_the_sum_over_ranks():
    _compare("grouped", config_of(), (5, 5), expert_scale=2.0, expert_grad_scale=1.0)


every_kind = pytest.mark.parametrize("kind", ["grouped", "sparse", "scatter", "fused", "batched"])


@every_kind
def test_R3_a_layer_without_tokens_on_one_rank(kind):
    _compare(kind, config_of(kind), (0, 6))


@every_kind
def test_R3_a_layer_without_tokens_on_all_ranks(kind):
    _compare(kind, config_of(kind), (0, 0))


@every_kind
def test_R4_a_layer_with_unequal_token_counts(kind):
    _compare(kind, config_of(kind), (3, 11))


@pytest.mark.parametrize(
    "rule, factor", [("megablocks", 0.5), ("megablocks", 1.0), ("tutel", 0.5), ("tutel", 1.0), ("tutel", -1.0)]
)
def test_R9_capacity_counts_all_ranks_tokens(rule, factor):
    _compare("batched", config_of(capacity_rule=rule, capacity_factor=factor), (9, 4))


def test_more_ranks_than_experts_cut_each_expert():
    _compare("grouped", config_of(num_experts=2, mlp_bias=False), (3, 4, 2, 5))


def _refused():
    try:
        dMoE(config_of(num_experts=3), expert_parallel_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_R5_a_layer_refuses_experts_that_cannot_be_divided():
    message = "num_experts=3: must be divisible by the expert-parallel size 2"
    assert run_distributed_test(_refused, 2) == [message] * 2


def _global_losses(config, counts):
    rank = dist.get_rank()
    layer = fill(dMoE(config, loss_group=dist.group.WORLD, seed=5))
    x, _ = batch(config, sum(counts), seed=0)
    x = x.split(counts)[rank]
    _, aux = layer.forward_with_aux(x)
    sum(aux.losses.values()).backward()
    return {name: loss.detach() for name, loss in aux.losses.items()}, layer.router.layer.weight.grad


@pytest.mark.parametrize("world", [2, 4])
def test_N7_global_losses_do_not_depend_on_the_split(world):
    """The mean over equal splits, of the losses and of their gradients, is that of the whole batch in one process."""
    config = config_of(load_balancing_scope="global")
    results = run_distributed_test(_global_losses, world, config, (8 // world,) * world)
    layer = fill(dMoE(config, seed=5))
    _, aux = layer.forward_with_aux(batch(config, 8, seed=0)[0])
    sum(aux.losses.values()).backward()
    for name, loss in aux.losses.items():
        mean = torch.stack([losses[name] for losses, _ in results]).mean()
        assert relative_error(mean, loss.detach()) < TOLERANCE, name
    gradient = torch.stack([grad for _, grad in results]).mean(0)
    assert relative_error(gradient, layer.router.layer.weight.grad) < TOLERANCE


def _from_arguments():
    arguments = Arguments(
        hidden_size=12,
        ffn_hidden_size=20,
        moe_num_experts=4,
        fp16=False,
        device="cpu",
        moe_expert_model_parallelism=True,
        expert_parallel_group=dist.group.WORLD,
        return_bias=False,
    )
    torch.manual_seed(0)
    spread = dMoE(arguments)
    torch.manual_seed(0)
    arguments.moe_expert_model_parallelism = False
    whole = dMoE(arguments)
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(dist.get_rank()))
    marks = {p.expert_model_parallel for p in spread.experts.mlp.parameters()}
    whole_state = whole.state_dict()
    spread.load_state_dict(whole_state)  # cut to the experts here, which are what was drawn
    mlp = spread.experts.mlp
    return relative_error(spread(x), whole(x)), mlp.num_local_experts, mlp.gradient_scale, marks


def test_arguments_spread_the_experts_as_in_0_10():
    for error, local, scale, marks in run_distributed_test(_from_arguments, 2):
        assert error < 1e-6 and local == 2 and scale == 0.5 and marks == {True}


def _copies(kwargs):
    group = dist.group.WORLD
    if kwargs.pop("mesh", False):
        kwargs["expert_mesh"] = init_device_mesh("cpu", (2,))
    else:
        kwargs["expert_parallel_group"] = group
    config = config_of(load_balancing_scope="global")
    layers = [moe.dMoE(config, **kwargs), moe.MoE(config.replace(capacity_factor=0.0), **kwargs)]
    values = {"device": "cpu", "fp16": False, "moe_num_experts": 4, "hidden_size": 12, "ffn_hidden_size": 20}
    values |= {"moe_expert_model_parallelism": True, "expert_parallel_group": group, "return_bias": False}
    layers += [kind(Arguments(**values)) for kind in (dMoE, MoE)]
    x, _ = batch(config, 6, seed=dist.get_rank())
    errors = []
    for layer in layers:
        copied = copy.deepcopy(torch.nn.Sequential(layer))[0]
        assert type(copied) is type(layer) and not {*map(id, copied.modules())} & {*map(id, layer.modules())}
        late = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
        marks = [{n for n, p in one.named_parameters() if is_moe_param(p)} for one in (layer, copied, late)]
        assert marks[0] and marks == [marks[0]] * 3
        with pytest.raises(TypeError, match="cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object"):
            torch.save(layer, io.BytesIO())  # docs/parallelism.md quotes it, and says to save this instead:
        torch.save(layer.state_dict(), saved := io.BytesIO())
        copied.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
        with torch.no_grad():
            outs = [one(x) for one in (layer, copied)]
            [p.zero_() for p in copied.parameters()]
            errors.append([torch.equal(*outs), torch.equal(outs[0], layer(x)), bool(copied(x).any())])
    return errors


@pytest.mark.parametrize("kwargs", [{}, {"mesh": True}], ids=["group", "mesh"])
def test_a_deep_copy_shares_the_groups_and_nothing_else(kwargs):
    for errors in run_distributed_test(_copies, 2, kwargs):
        assert errors == [[True, True, False]] * 4
