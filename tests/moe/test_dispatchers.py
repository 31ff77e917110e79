"""Tokens travel to their experts and back: values and every gradient against a float64 loop over all ranks' tokens."""

import pytest
import torch
import torch.distributed as dist

from megablocks.config import MoEConfig
from megablocks.kinds import IMPLS
from megablocks.moe.dispatchers import AllToAllDispatcher, LocalDispatcher
from megablocks.moe.experts import Experts
from megablocks.moe.groups import ExpertShard, shard_of
from megablocks.ops.routing.dispatch import make_routing
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all

TOLERANCE = 1e-5


def _config(**changes):
    width = 128 if changes.get("mlp_impl") == "sparse" else 20
    values = dict(hidden_size=12, ffn_hidden_size=width, num_experts=4, top_k=2, activation="swiglu", mlp_bias=True)
    return MoEConfig(**{**values, **changes})


def _experts(config, **kwargs):
    """Experts whose biases are not zero, equal for every spread over ranks."""
    experts = Experts(config, seed=7, init_method=torch.nn.init.xavier_uniform_, **kwargs)
    everyone = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in ("b1", "c1", "b2"):
            bias = getattr(experts, name)
            if bias is not None:
                width = config.hidden_size if name == "b2" else config.ffn_hidden_size
                full = torch.randn(config.num_experts, width, generator=everyone)
                cut = slice(None)
                if name != "b2":
                    part = experts.shard.ffn_rank
                    cut = slice(part * bias.shape[1], (part + 1) * bias.shape[1])
                start = experts.shard.expert_offset
                bias.copy_(full[start : start + bias.shape[0], cut])
    return experts


def _batch(config, rank, tokens, ids):
    """This rank's x (T, H), weights (T, K), expert ids (T, K) and the gradient of its output (T, H)."""
    draw = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, config.hidden_size, generator=draw)
    weight = torch.rand(tokens, config.top_k, generator=draw)
    expert = torch.randint(0, config.num_experts, (tokens, config.top_k), generator=draw)
    if ids == "one":
        expert.fill_(config.num_experts - 1)
    elif ids == "some empty":
        expert %= max(1, config.num_experts // 2)
    elif ids in ("uniform", "zipf", "one rank"):  # K different experts a token
        load = torch.arange(1.0, config.num_experts + 1) ** (-1.5 if ids == "zipf" else 0)
        if ids == "one rank":
            load[config.num_experts // 2 :] = 0
        expert = torch.multinomial(load.expand(max(tokens, 1), -1), config.top_k, generator=draw)[:tokens]
    elif ids == "none on rank 0" and rank == 0:
        expert.fill_(-1)
    elif ids == "twice and none":
        expert[:, 1:] = expert[:, :1]
        expert[::3] = -1
        expert[1::3, 0] = config.num_experts
    return x, weight, expert, torch.randn(tokens, config.hidden_size, generator=draw)


def _run_rank(config, counts, ids, ffn_shards, ffn_fastest, grad_scale, dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    with poisoned_empty():
        dispatcher = AllToAllDispatcher(
            dist.group.WORLD, config.num_experts, ffn_shards=ffn_shards, ffn_fastest=ffn_fastest
        )
        shard = dispatcher.shard
        experts = _experts(
            config,
            shard=shard,
            grad_scale=grad_scale if grad_scale else 1 / world,
        ).to(dtype)
        x, weight, expert, dy = _batch(config, rank, counts[rank], ids)
        x, dy = x.to(dtype).requires_grad_(), dy.to(dtype)
        weight.requires_grad_()
        y = dispatcher.run(x, make_routing(expert, weight, config.num_experts), experts)
        y.backward(dy)
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return shard, y.detach(), x.grad, weight.grad, grads


def _expected(config, counts, ids):
    batches = [_batch(config, rank, tokens, ids) for rank, tokens in enumerate(counts)]
    parameters = {n: p.detach().double().requires_grad_() for n, p in _experts(config).named_parameters()}
    x = torch.cat([b[0] for b in batches]).double().requires_grad_()
    weight = torch.cat([b[1] for b in batches]).double().requires_grad_()
    expert = torch.cat([b[2] for b in batches])
    token = torch.arange(x.shape[0]).repeat_interleave(config.top_k)
    y = experts_oracle(x, token, expert.flatten(), weight.flatten(), parameters, config.num_experts, config.activation)
    y.backward(torch.cat([b[3] for b in batches]).double())
    return y.detach(), x.grad, weight.grad, {n: p.grad for n, p in parameters.items()}


def _compare(
    config, counts, ids="random", ffn_shards=1, ffn_fastest=True, scaled=False, dtype=torch.float32, tol=TOLERANCE
):
    world = len(counts)
    results = run_distributed_test(
        _run_rank, world, config, counts, ids, ffn_shards, ffn_fastest, None if scaled else 1.0, dtype
    )
    y, dx, dweight, grads = _expected(config, counts, ids)
    start = 0
    for tokens, (_, rank_y, rank_dx, rank_dweight, _) in zip(counts, results, strict=True):
        here = slice(start, start + tokens)
        for name, actual, expected in (("y", rank_y, y), ("dx", rank_dx, dx), ("dweight", rank_dweight, dweight)):
            assert relative_error(actual, expected[here]) < tol, name
        start += tokens
    for shard, _, _, _, rank_grads in results:
        owned = slice(shard.expert_offset, shard.expert_offset + shard.num_local_experts)
        for name, actual in rank_grads.items():
            assert actual is not None, f"{name} was not touched"
            expected = grads[name].view(config.num_experts, -1, grads[name].shape[-1])[owned]
            if name in ("w1", "v1", "w2"):
                expected = expected.chunk(shard.ffn_size, dim=1)[shard.ffn_rank]
            elif name != "b2":
                expected = expected.chunk(shard.ffn_size, dim=2)[shard.ffn_rank]
            elif shard.ffn_rank:
                expected = torch.zeros_like(expected)
            if scaled:
                expected = expected / world
            assert relative_error(actual.reshape(expected.shape), expected) < tol, name
            empty = expected.flatten(1).abs().sum(1) == 0
            assert (actual.reshape(expected.shape)[empty] == 0).all(), f"{name} of an empty expert is not exactly 0"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("counts", [(0, 5), (6, 0, 3, 0), (0, 0)], ids=str)
def test_R3_zero_tokens_on_one_rank_or_all(counts, impl):
    _compare(_config(mlp_impl=impl), counts)


def test_R3_a_rank_whose_tokens_have_no_expert():
    _compare(_config(), (4, 5), ids="none on rank 0")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("counts", [(1, 9), (3, 8, 1, 13)], ids=str)
def test_R4_unequal_token_counts(counts, impl):
    _compare(_config(mlp_impl=impl, activation="gelu"), counts)


def test_R1_an_empty_expert_across_ranks():
    _compare(_config(), (5, 7), ids="some empty")


def test_R2_all_tokens_to_one_expert_across_ranks():
    _compare(_config(), (5, 7), ids="one")


def test_R7_an_expert_twice_and_no_expert_across_ranks():
    _compare(_config(), (5, 7), ids="twice and none")


@pytest.mark.parametrize("counts", [(9, 7), (6, 1, 0, 8)], ids=str)
@pytest.mark.parametrize("ids, impl", [("uniform", "grouped"), ("zipf", "fused"), ("one rank", "scatter")])
def test_N8_tokens_with_several_experts_on_a_rank(counts, ids, impl):
    _compare(_config(mlp_impl=impl, num_experts=8, top_k=4), counts, ids=ids)


@pytest.mark.parametrize("counts, ffn_shards", [((4, 7), 1), ((3, 0, 5, 2), 1), ((3, 5, 0, 2), 2)], ids=str)
def test_R5_every_token_to_every_expert_across_ranks(counts, ffn_shards):
    _compare(_config(top_k=4), counts, ids="uniform", ffn_shards=ffn_shards, ffn_fastest=False)


def _rows_and_pairs(config, tokens):
    dispatcher = AllToAllDispatcher(dist.group.WORLD, config.num_experts)
    x, weight, expert, _ = _batch(config, dist.get_rank(), tokens, "twice and none")
    seen = []

    def double(x, dispatch, weight):
        seen.append((x.shape[0], dispatch.num_pairs, dispatch.num_rows))
        return 2 * x

    y = dispatcher.run(x, make_routing(expert, weight, config.num_experts), double)
    owner = [
        {int(e) // dispatcher.shard.num_local_experts for e in row if 0 <= e < config.num_experts} for row in expert
    ]
    ranks = torch.tensor([len(ranks) for ranks in owner])
    return seen, torch.equal(y, 2 * x * ranks.unsqueeze(1)), owner, int(((expert >= 0) & (expert < 8)).sum())


@pytest.mark.parametrize("world", [2, 4])
def test_a_token_crosses_once_a_rank_and_comes_back_once(world):
    """The experts get a row for each token that has any of them, and every (token, expert) pair once."""
    results = run_distributed_test(_rows_and_pairs, world, _config(num_experts=8, top_k=4), 11)
    for rank, (seen, sums_a_row_a_rank, _, _) in enumerate(results):
        assert sums_a_row_a_rank
        assert len(seen) == 1 and seen[0][0] == sum(rank in ranks for _, _, owner, _ in results for ranks in owner)
    assert sum(seen[0][1] for seen, *_ in results) == sum(pairs for *_, pairs in results)
    assert all(seen[0][1] == seen[0][2] for seen, *_ in results), "no row of the products is unused"


@pytest.mark.parametrize("ffn_fastest, impl", [(True, "grouped"), (False, "grouped"), (True, "sparse")])
def test_R3_expert_tensor_parallel_zero_tokens_and_partial_sums(ffn_fastest, impl):
    _compare(_config(mlp_impl=impl), (4, 0, 7, 2), ffn_shards=2, ffn_fastest=ffn_fastest)


def test_expert_tensor_parallel_with_one_expert_block():
    _compare(_config(num_experts=3, ffn_hidden_size=18), (4, 3, 5), ffn_shards=3)


@pytest.mark.parametrize("world", [2, 4])
def test_N8_expert_gradients_are_scaled_to_the_average_of_the_ranks(world):
    _compare(_config(), (6,) * world, scaled=True)
    _compare(_config(), (6,) * world, scaled=False)


def test_bfloat16_rows_travel():
    _compare(_config(), (4, 6), dtype=torch.bfloat16, tol=3e-2)


def test_R5_experts_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match=r"num_experts=6: must be divisible by the expert-parallel size 4"):
        shard_of(0, 4, 6)
    with pytest.raises(ValueError, match=r"ffn_shards=3: must divide the size of the expert group, 4"):
        shard_of(0, 4, 6, ffn_shards=3)


def test_shards_cover_every_expert_once_in_both_orders():
    assert shard_of(3, 4, 8, ffn_shards=2) == ExpertShard(4, 4, 1, 2)
    assert shard_of(3, 4, 8, ffn_shards=2, ffn_fastest=False) == ExpertShard(4, 4, 1, 2)
    assert shard_of(1, 4, 8, ffn_shards=2) == ExpertShard(0, 4, 1, 2)
    assert shard_of(1, 4, 8, ffn_shards=2, ffn_fastest=False) == ExpertShard(4, 4, 0, 2)


def _frozen(frozen_experts, x_needs_grad):
    config = _config()
    dispatcher = AllToAllDispatcher(dist.group.WORLD, config.num_experts)
    experts = _experts(config, shard=dispatcher.shard)
    experts.requires_grad_(dist.get_rank() not in frozen_experts)
    x, weight, expert, dy = _batch(config, dist.get_rank(), 5, "random")
    x.requires_grad_(x_needs_grad)
    weight.requires_grad_()
    y = dispatcher.run(x, make_routing(expert, weight, config.num_experts), experts)
    y.backward(dy, retain_graph=True)
    first = [t.grad.clone() for t in (x, weight, experts.w1) if t.requires_grad]
    y.backward(dy)
    second = [t.grad for t in (x, weight, experts.w1) if t.requires_grad]
    return len(first), all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True)), weight.grad


@pytest.mark.parametrize(
    "frozen_experts, x_needs_grad", [((0, 1), True), ((0, 1), False), ((), False), ((0,), True), ((0,), False)]
)
def test_N5_frozen_parts_and_a_second_backward(frozen_experts, x_needs_grad):
    """frozen_experts: the ranks whose experts are frozen."""
    results = run_distributed_test(_frozen, 2, frozen_experts, x_needs_grad)
    _, _, dweight, _ = _expected(_config(), (5, 5), "random")
    for rank, (count, doubled, weight_grad) in enumerate(results):
        assert count == 1 + x_needs_grad + (rank not in frozen_experts)
        assert doubled
        assert relative_error(weight_grad, 2 * dweight[5 * rank : 5 * rank + 5]) < TOLERANCE


def _frozen_on_one_rank(part):
    config = _config()
    dispatcher = AllToAllDispatcher(dist.group.WORLD, config.num_experts)
    experts = _experts(config, shard=dispatcher.shard)
    x, weight, expert, _ = _batch(config, dist.get_rank(), 5, "random")
    x.requires_grad_(part == "x" and dist.get_rank() == 0)
    weight.requires_grad_(part == "x" or dist.get_rank() == 0)
    routing = make_routing(expert, weight, config.num_experts)
    with torch.no_grad():
        dispatcher.run(x, routing, experts)  # where no rank wants a gradient nothing differs
    try:
        dispatcher.run(x, routing, experts)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("part, name", [("x", "x"), ("weight", "routing.weight")])
def test_N5_what_is_frozen_on_one_rank_alone_is_refused_in_forward(part, name):
    """In backward the other rank would wait for ever."""
    here, there = run_distributed_test(_frozen_on_one_rank, 2, part)
    rule = "must be equal on all ranks that share the experts; freeze the router and what computes x on all or none"
    assert here == f"{name}.requires_grad=True, on rank 1 False: {rule}"
    assert there == f"{name}.requires_grad=False, on rank 0 True: {rule}"


def _eager_and_compiled(config, counts, ffn_shards):
    """Per way the outputs and gradients of two routings, between which the numbers of rows differ."""
    rank = dist.get_rank()
    dispatcher = AllToAllDispatcher(dist.group.WORLD, config.num_experts, ffn_shards=ffn_shards)
    experts = _experts(config, shard=dispatcher.shard)

    def run(x, weight, expert):
        return dispatcher.run(x, make_routing(expert, weight, config.num_experts), experts)

    ways = []
    # ranks that do the same as one that compiles, which takes 4 s, run eagerly; those that compile hold every shard
    compiles = rank >= len(counts) // 2 or not counts[rank]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # the numbers of rows, which the host reads
        for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run):
            found = []
            for ids in ("uniform", "one rank"):
                x, weight, expert, dy = _batch(config, rank, counts[rank], ids)
                y = call(x.requires_grad_(), weight.requires_grad_(), expert)
                found += [y.detach(), *torch.autograd.grad(y, [x, weight, *experts.parameters()], dy)]
            ways.append(found)
    return ways


@pytest.mark.parametrize("counts, ffn_shards", [((9, 9), 1), ((0, 5), 1), ((3, 5, 6, 2), 2)], ids=str)
def test_N9_compiles_in_one_graph(counts, ffn_shards):
    for eager, compiled in run_distributed_test(_eager_and_compiled, len(counts), _config(), counts, ffn_shards):
        torch.testing.assert_close(compiled, eager)


def test_local_dispatcher_equals_the_oracle():
    config = _config()
    experts = _experts(config)
    x, weight, expert, dy = _batch(config, 0, 9, "twice and none")
    with poisoned_empty():
        y = LocalDispatcher(None, config.num_experts).run(x, make_routing(expert, weight, config.num_experts), experts)
    assert relative_error(y, _expected(config, (9,), "twice and none")[0]) < TOLERANCE
