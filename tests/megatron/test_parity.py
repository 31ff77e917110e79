"""With copied weights our layer equals Megatron's MoELayer with SequentialMLP: output, losses, every gradient."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F

from megablocks.testing.launcher import run_distributed_test

CASES: dict[str, dict[str, Any]] = {
    "gelu_top1": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "gelu_top2_softmax_after": dict(),
    "gelu_top2_softmax_before": dict(moe_router_pre_softmax=True),
    "swiglu": dict(activation_func=F.silu, gated_linear_unit=True),
    "geglu_scaled": dict(gated_linear_unit=True, moe_router_topk_scaling_factor=2.5, moe_router_pre_softmax=True),
    "relu_top3_seq_aux": dict(activation_func=F.relu, moe_router_topk=3, moe_router_load_balancing_type="seq_aux_loss"),
    "global_aux": dict(moe_router_load_balancing_type="global_aux_loss"),
    "two_aux_losses": dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.02, 0.01]
    ),
    "three_aux_losses": dict(
        moe_router_load_balancing_type=["global_aux_loss", "seq_aux_loss", "aux_loss"],
        moe_aux_loss_coeff=[0.03, 0.01, 0.02],
        moe_router_topk=3,
    ),
    "sigmoid_top2_global_aux": dict(
        moe_router_score_function="sigmoid", moe_router_load_balancing_type="global_aux_loss", moe_z_loss_coeff=None
    ),
    "shared_expert": dict(moe_shared_expert_intermediate_size=40),
    "shared_expert_gated": dict(moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True),
    "sigmoid_groups_bias": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        num_moe_experts=8,
    ),
    "sigmoid_top1": dict(moe_router_score_function="sigmoid", moe_router_topk=1),
    "expert_biases": dict(add_bias_linear=True, bias_activation_fusion=False),
    "glu_biases": dict(
        add_bias_linear=True, bias_activation_fusion=False, gated_linear_unit=True, activation_func=F.silu
    ),
    "padding": dict(),
    "router_fp64": dict(moe_router_dtype="fp64"),
    "jitter": dict(moe_input_jitter_eps=0.1),
    "forced_balance": dict(moe_router_force_load_balancing=True),
    "per_token_loss": dict(calculate_per_token_loss=True),
    # with Megatron's own routing
    "sinkhorn": dict(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
    "quantile_balancing": dict(moe_router_load_balancing_type="quantile_balancing", moe_aux_loss_coeff=0.0),
    "sqrtsoftplus": dict(moe_router_score_function="sqrtsoftplus"),
    "megatron_capacity": dict(moe_expert_capacity_factor=0.7),
    "megatron_capacity_position": dict(moe_expert_capacity_factor=0.5, moe_token_drop_policy="position"),
}


def _copy_weights(theirs: Any, ours: Any) -> None:
    with torch.no_grad():
        ours.router.load_state_dict(theirs.router.state_dict())
        if theirs.shared_experts is not None:
            ours.shared_experts.load_state_dict(theirs.shared_experts.state_dict())
        for name, value in _expert_tensors(theirs, lambda parameter: parameter.data).items():
            getattr(ours.experts.core, name).copy_(value.view_as(getattr(ours.experts.core, name)))


def _expert_tensors(theirs: Any, of: Any) -> dict[str, torch.Tensor]:
    """Megatron's per-expert linear layers in our layout; `of` gives the weights or their gradients."""
    config, out = theirs.config, {}
    experts = theirs.experts.local_experts
    up = torch.stack([of(e.linear_fc1.weight) for e in experts])  # (E, I or 2I, H)
    halves = up.chunk(2, dim=1) if config.gated_linear_unit else (up,)
    for name, half in zip(("w1", "v1"), halves, strict=False):
        out[name] = half.reshape(-1, config.hidden_size)
    out["w2"] = torch.stack([of(e.linear_fc2.weight).t() for e in experts]).reshape(-1, config.hidden_size)
    if config.add_bias_linear:
        bias = torch.stack([of(e.linear_fc1.bias) for e in experts])
        halves = bias.chunk(2, dim=1) if config.gated_linear_unit else (bias,)
        out |= dict(zip(("b1", "c1"), halves, strict=False))
        out["b2"] = torch.stack([of(e.linear_fc2.bias) for e in experts])
    return out


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))


def _compare(name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Relative norms of the differences between all that the two layers compute."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

    from megablocks.megatron.settings import MegaBlocksSettings
    from megablocks.megatron.specs import _moe_layer

    config = harness.transformer_config(harness.Layout(model=tuple(fields.items())))
    theirs_builder = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    torch.manual_seed(3)
    theirs = theirs_builder(config=config)
    ours = _moe_layer(theirs_builder, MegaBlocksSettings())(config=copy.deepcopy(config))
    _copy_weights(theirs, ours)
    for expert in theirs.experts.local_experts:  # Megatron adds the bias in place into a view, which autograd refuses
        expert.linear_fc2.register_forward_hook(lambda module, args, out: (out[0].clone(), out[1]))
    x = torch.randn(24, 2, config.hidden_size)
    upstream = torch.randn_like(x)
    bias = torch.linspace(-0.2, 0.2, config.num_moe_experts)
    padding = torch.zeros(2, 24, dtype=torch.bool)
    if name == "padding":  # Megatron computes the output of padding, we do not, so it is not compared
        padding[:, 18:] = True
        upstream[18:] = 0
    results = []
    for layer in (theirs, ours):
        destroy_moe_metrics_tracker()
        layer.train()
        layer.set_layer_number(2)
        if config.moe_router_enable_expert_bias:
            layer.router.expert_bias.data = bias.bfloat16()  # as Megatron's Float16Module leaves it
        inputs = x.clone().requires_grad_()
        torch.manual_seed(7)
        model_parallel_cuda_manual_seed(7)
        out, out_bias = layer(inputs, padding_mask=padding if name == "padding" else None)
        assert out_bias is None
        (out * upstream).sum().backward()
        values = {"output": out[:18] if name == "padding" else out, "dx": inputs.grad}
        values |= {f"router.{n}": p.grad for n, p in layer.router.named_parameters()}
        if layer.shared_experts is not None:
            values |= {f"shared.{n}": p.grad for n, p in layer.shared_experts.named_parameters()}
        if layer is ours:
            values |= {n: p.grad for n, p in layer.experts.core.named_parameters()}
        else:
            values |= _expert_tensors(layer, lambda parameter: parameter.grad)
        values |= {f"logged {n}": m.values.clone() for n, m in get_moe_metrics_tracker().metrics.items()}
        if config.moe_router_enable_expert_bias:
            with torch.no_grad():
                layer(x)  # an evaluation does not count
            values["tokens counted for the bias"] = layer.router.local_tokens_per_expert
            values["bits of the bias"] = torch.tensor(layer.router.expert_bias.dtype.itemsize * 8)
        results.append(values)
    reference, mine = results
    assert reference.keys() == mine.keys()
    return {key: _relative(mine[key].flatten(), reference[key].flatten()) for key in reference}


def _compare_all(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    harness.initialize(harness.Layout())
    out = {}
    for name, fields in cases.items():
        try:
            out[name] = _compare(name, fields)
        except Exception as error:
            out[name] = {f"{type(error).__name__}: {error}": float("inf")}
    return out


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    return run_distributed_test(_compare_all, 1, CASES)[0]


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_megatrons_sequential_mlp(differences: dict[str, dict[str, float]], case: str) -> None:
    worst = {name: error for name, error in differences[case].items() if not error <= 1e-5}
    assert not worst
    assert len(differences[case]) >= 5  # output, dx, router, w1, w2


ROUTERS: dict[str, dict[str, Any]] = {
    "aux": dict(),
    "global_aux, padding": dict(moe_router_load_balancing_type="global_aux_loss"),
    "aux and global, top-1": dict(
        moe_router_load_balancing_type=["aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.02, 0.01],
        moe_router_topk=1,
        moe_router_pre_softmax=True,
    ),
    "aux, per-token loss, padding": dict(calculate_per_token_loss=True),
    "global_aux, per-token loss": dict(moe_router_load_balancing_type="global_aux_loss", calculate_per_token_loss=True),
    "seq_aux, padding": dict(moe_router_load_balancing_type="seq_aux_loss"),
}


def _compare_routers(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """As `_compare`, the routers alone, of two micro-batches with other tokens on each tensor-parallel rank."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from megablocks.megatron.topk_router import MegaBlocksRouter

    layout = harness.Layout(tp=2, etp=1)
    harness.initialize(layout)
    out = {}
    for name, fields in cases.items():
        config = harness.transformer_config(harness.Layout(tp=2, etp=1, model=tuple(fields.items())))
        routers = [kind(config, pg_collection=get_default_pg_collection()) for kind in (TopKRouter, MegaBlocksRouter)]
        routers[1].load_state_dict(routers[0].state_dict())
        results = []
        for router in routers:
            destroy_moe_metrics_tracker()
            router.train()
            router.set_layer_number(1)
            torch.manual_seed(harness.dist.get_rank())
            values = {}
            for batch in range(2):
                x, upstream = torch.randn(11, 3, config.hidden_size, requires_grad=True), torch.randn(33, 4)
                padding = None
                if "padding" in name:  # whose weights Megatron computes, and we do not
                    padding = torch.rand(11, 3) < 0.3
                    upstream[padding.flatten()] = 0
                found = router(x, padding_mask=padding)
                if router is routers[0]:
                    weight, given = found[0], upstream
                else:
                    chosen = found.expert >= 0
                    weight = found.weight[chosen]
                    given = upstream[found.token[chosen].long(), found.expert[chosen].long()]
                (weight * given).sum().backward()
                values[f"dx of batch {batch}"] = x.grad
            values["gradient"] = router.weight.grad
            values |= {f"logged {n}": m.values.clone() for n, m in get_moe_metrics_tracker().metrics.items()}
            results.append(values)
        reference, mine = results
        assert reference.keys() == mine.keys()
        out[name] = {key: _relative(mine[key].flatten(), reference[key].flatten()) for key in reference}
    return out


def test_routers_of_two_ranks_equal_megatrons() -> None:
    for rank in run_distributed_test(_compare_routers, 2, ROUTERS):
        assert {(case, key): e for case, found in rank.items() for key, e in found.items() if not e <= 1e-5} == {}
        assert all(len(found) >= 5 for found in rank.values())  # dx twice, the gradient, a loss and the z-loss


def _dense_scores(cases: list[tuple[str, bool]]) -> list[int]:
    """How often a step's router computes Megatron's dense scores, by kind of load-balancing loss and assignment."""
    from unittest import mock

    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megablocks.megatron import topk_router

    harness.initialize(harness.Layout())
    counts = []
    for kind, uniform in cases:
        settings = (("uniform_assignment", uniform),)
        layout = harness.Layout(model=(("moe_router_load_balancing_type", kind),), settings=settings)
        config = harness.transformer_config(layout)
        router = topk_router.MegaBlocksRouter(config, pg_collection=get_default_pg_collection()).train()
        router.set_layer_number(1)
        name = "compute_routing_scores_for_aux_loss"
        with mock.patch.object(topk_router, name, wraps=getattr(topk_router, name)) as dense:
            router(torch.randn(5, 2, config.hidden_size))
        counts.append(dense.call_count)
    return counts


def test_only_the_loss_of_each_sequence_or_of_other_experts_needs_dense_scores() -> None:
    expected = {("aux_loss", False): 0, ("global_aux_loss", False): 0, ("seq_aux_loss", False): 1, ("none", False): 0}
    expected |= {("aux_loss", True): 1}  # the loss balances the router's choice, which a uniform assignment replaces
    assert run_distributed_test(_dense_scores, 1, list(expected))[0] == list(expected.values())


def _pairs() -> list[int]:
    """How many pairs a router with token rounding chooses for ten tokens, in training and in evaluation."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megablocks.megatron.topk_router import MegaBlocksRouter

    harness.initialize(harness.Layout())
    settings = (("token_rounding", "up"), ("token_rounding_tile", 7))
    config = harness.transformer_config(harness.Layout(settings=settings))
    router = MegaBlocksRouter(config, pg_collection=get_default_pg_collection())
    router.set_layer_number(1)
    x = torch.randn(5, 2, config.hidden_size)
    return [int((router.train(training)(x).expert >= 0).sum()) for training in (True, False)]


def test_R9_an_evaluation_rounds_no_tokens() -> None:
    ((rounded, evaluated),) = run_distributed_test(_pairs, 1)
    assert rounded % 7 == 0 and evaluated == 20


def _gradients_above_frozen_layers(recomputed: list[str]) -> list[dict[str, torch.Tensor]]:
    """The gradients of a layer whose input needs none, for each of Megatron's recompute modules."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megablocks.megatron.settings import MegaBlocksSettings
    from megablocks.megatron.specs import _moe_layer

    harness.initialize(harness.Layout())
    builder = _moe_layer(get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False), MegaBlocksSettings())
    found = []
    for modules in recomputed:
        fields = (("moe_shared_expert_intermediate_size", 40),)
        config = harness.transformer_config(harness.Layout(recompute=modules, model=fields))
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3)
        layer = builder(config=config).train()
        layer.set_layer_number(1)
        layer(torch.randn(7, 2, config.hidden_size))[0].square().sum().backward()
        found.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    return found


def test_N5_a_recomputed_layer_above_frozen_layers_has_all_gradients() -> None:
    """Megatron's checkpoint of an input without a gradient computed none, and the run went on without an error."""
    plain, *others = run_distributed_test(_gradients_above_frozen_layers, 1, ["", "moe", "shared_experts"])[0]
    for found in others:
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            assert gradient.any() and found[name] is not None and torch.equal(found[name], gradient), name
