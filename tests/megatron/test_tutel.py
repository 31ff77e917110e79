"""Tutel's own layer in our specs, where Tutel is installed (third_party/fetch.sh Tutel, then pip install it)."""

from __future__ import annotations

import importlib.util
from functools import partial

import harness
import pytest
import torch
from harness import Layout, Trained

from megablocks.config import MoEConfig
from megablocks.moe import MoE
from megablocks.testing.oracle import relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tutel") is None, reason="needs Tutel: see third_party/pins.txt"
)
STEPS = 10
BASE = Layout(layers=2, model=(("moe_z_loss_coeff", None),), settings=(("layer", "tutel"), ("capacity_factor", 0.0)))
FORCED = (("moe_z_loss_coeff", None), ("moe_router_force_biased", -3.0))
LAYOUTS = {
    "alone": BASE,
    "capped": BASE.but(settings=(("layer", "tutel"), ("capacity_factor", 0.5))),
    "skewed": BASE.but(model=FORCED),
}
Runs = dict[str, list[Trained]]


@pytest.fixture(scope="module")
def alone() -> Runs:
    layouts = [(name, layout, STEPS) for name, layout in LAYOUTS.items()]
    return harness.on_ranks(harness.train_all, 1, layouts)


@pytest.fixture(scope="module")
def spread() -> Runs:
    layouts = [("ep2", BASE.but(ep=2), STEPS), ("optimizer", BASE.but(ep=2, distributed_optimizer=True), STEPS)]
    return harness.on_ranks(harness.train_all, 2, layouts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tutels_layer_trains(alone: Runs, name: str) -> None:
    (run,) = alone[name]
    assert run.losses[-1] < run.losses[0] - 0.1
    assert run.load is not None
    load = run.load[:, :-1].double()
    assert bool((load.amax(1) > 1.6 * load.mean(1)).all()) == (name == "skewed")
    assert (run.load[:, :-1].sum(1) == STEPS * harness.GLOBAL_BATCH * harness.SEQ * 2).all()
    assert bool(run.load[:, -1].all()) == (name == "capped")


@pytest.mark.parametrize("name", ["ep2", "optimizer"])
def test_tutels_layer_is_the_same_on_two_ranks(alone: Runs, spread: Runs, name: str) -> None:
    (reference,) = alone["alone"]
    runs = spread[name]
    error, tensor = harness.worst_difference(
        harness.assemble([run.grads for run in runs]), harness.assemble([reference.grads])
    )
    assert error <= 1e-5, f"gradient of {tensor}"
    assert runs[0].losses == pytest.approx(reference.losses, rel=1e-4)
    assert runs[0].norms[0] == pytest.approx(reference.norms[0], rel=1e-5)
    assert runs[0].aux[0] == pytest.approx(reference.aux[0], rel=1e-5)


@pytest.mark.parametrize("top_k, factor", [(1, 0.5), (1, 1.0), (1, 2.0), (1, 0.0), (1, -0.75), (2, 2.0), (2, 0.0)])
def test_tutels_layer_computes_what_ours_does_with_its_rule(top_k: int, factor: float) -> None:
    """At equal weights. With two experts a token Tutel drops second choices first, and its loss counts only the first
    choices, so that only the output of a layer that drops nothing is compared."""
    from tutel import moe as tutel_moe

    experts, hidden, width, tokens = 4, 12, 20, 30
    config = MoEConfig(
        hidden_size=hidden, ffn_hidden_size=width, num_experts=experts, top_k=top_k, capacity_factor=factor,
        capacity_rule="tutel", normalize_top_k=1.0 if top_k > 1 else None, load_balancing_loss_weight=1.0, init_std=0.5,
    )  # fmt: skip
    ours = MoE(config, seed=1)
    theirs = tutel_moe.moe_layer(
        gate_type={"type": "top", "k": top_k, "capacity_factor": factor},
        model_dim=hidden,
        experts={
            "type": "ffn", "num_experts_per_device": experts, "hidden_size_per_expert": width,
            "activation_fn": partial(torch.nn.functional.gelu, approximate="tanh"),
            "has_fc1_bias": False, "has_fc2_bias": False,
        },
    )  # fmt: skip
    pairs = [
        (ours.router.layer.weight, theirs.gates[0].wg.weight),
        (ours.experts.w1, theirs.experts.batched_fc1_w),
        (ours.experts.w2, theirs.experts.batched_fc2_w),
    ]
    with torch.no_grad():
        for mine, its in pairs:
            its.copy_(mine.view(its.shape))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=draw)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y, aux = ours.forward_with_aux(inputs[0])
    z = theirs(inputs[1])
    assert bool(aux.metrics["dropped"]) == (factor in (0.5, 1.0, -0.75))
    assert theirs.dispatch_count.tolist() == aux.metrics["tokens_per_expert"].tolist()
    losses = (aux.losses["load_balancing_loss"], z.l_aux) if top_k == 1 else (0.0, 0.0)
    (y.square().sum() + losses[0]).backward()
    (z.square().sum() + losses[1]).backward()
    assert relative_error(y, z.detach()) < 1e-5
    assert relative_error(inputs[0].grad, inputs[1].grad) < 1e-5
    for mine, its in pairs:
        assert relative_error(mine.grad.view(its.shape), its.grad) < 1e-5
