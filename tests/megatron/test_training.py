"""Models that must only train and count: expert choice, each capacity rule, other layers in our specs, bf16."""

from __future__ import annotations

import importlib.util

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Layout, Trained

from megablocks.testing.launcher import run_distributed_test

BASE = Layout(ep=2, layers=2)
STEPS = 6
PAIRS = STEPS * harness.GLOBAL_BATCH * harness.SEQ * 2  # (token, expert) pairs of a layer, top-2
BLOCK = (("moe_ffn_hidden_size", 64),)
FUSED = (("mlp_impl", "fused"),)
MAIN_GRADS = (("gradient_accumulation_fusion", True),)
OVERLAP = BASE.but(overlap=True, distributed_optimizer=True)
HAS_TUTEL = importlib.util.find_spec("tutel") is not None
NO_AUX = (("moe_aux_loss_coeff", 0.0),)
LAYOUTS = {
    "dropless": BASE,
    "expert choice": BASE.but(model=NO_AUX, settings=(("router_type", "expert_choice"),)),
    "skewed load": BASE.but(model=(("moe_router_force_biased", -3.0),)),
    "token rounding": BASE.but(
        settings=(("token_rounding", "stochastic_frequency"), ("token_rounding_tile", 4)), recompute="full"
    ),
    "capacity, megablocks": BASE.but(settings=(("capacity_factor", 0.75),)),
    "capacity, megablocks, fullest": BASE.but(settings=(("capacity_factor", 0.0),)),
    "capacity, tutel": BASE.but(settings=(("capacity_rule", "tutel"), ("capacity_factor", 0.75))),
    "capacity, tutel, capped": BASE.but(settings=(("capacity_rule", "tutel"), ("capacity_factor", -0.75))),
    "capacity, tutel, fullest": BASE.but(settings=(("capacity_rule", "tutel"), ("capacity_factor", 0.0))),
    "padded, megablocks": BASE.but(settings=(("capacity_factor", 0.75), ("pad_to_capacity", True))),
    "padded, megablocks, fullest": BASE.but(settings=(("capacity_factor", 0.0), ("pad_to_capacity", True))),
    "padded, tutel": BASE.but(
        settings=(("capacity_rule", "tutel"), ("capacity_factor", 0.75), ("pad_to_capacity", True))
    ),
    "capacity, megatron": BASE.but(model=(("moe_expert_capacity_factor", 0.75),)),
    "capacity, megatron's layer": BASE.but(
        model=(("moe_expert_capacity_factor", 0.75),), settings=(("layer", "megatron"),)
    ),
    **({} if HAS_TUTEL else {"layer tutel without the package": BASE.but(settings=(("layer", "tutel"),))}),
    "our experts in megatron's layer": BASE.but(
        model=(("gated_linear_unit", True), ("activation_func", F.silu)), settings=(("layer", "experts"),)
    ),
    "megatron's layer": BASE.but(
        model=(("gated_linear_unit", True), ("activation_func", F.silu)), settings=(("layer", "megatron"),)
    ),
    "our layer, same model": BASE.but(model=(("gated_linear_unit", True), ("activation_func", F.silu))),
    "bf16": BASE.but(dtype="bfloat16", distributed_optimizer=True),
    "recomputed activation": BASE.but(settings=(("recompute_activation", True),)),
    "grouped, a block wide": BASE.but(model=BLOCK, settings=(("mlp_impl", "grouped"),)),
    "sparse": BASE.but(model=BLOCK, settings=(("mlp_impl", "sparse"),)),
    "sparse in megatron's layer": BASE.but(model=BLOCK, settings=(("mlp_impl", "sparse"), ("layer", "experts"))),
    "fused": BASE.but(settings=FUSED),
    "scatter": BASE.but(settings=(("mlp_impl", "scatter"),)),
    "fused into main gradients": BASE.but(settings=(*FUSED, *MAIN_GRADS)),
    "scatter with main gradients": BASE.but(settings=(("mlp_impl", "scatter"), *MAIN_GRADS)),
    "recomputed into main gradients": BASE.but(settings=(*FUSED, *MAIN_GRADS), recompute="full"),
    "fused in megatron's layer into main gradients": BASE.but(settings=(*FUSED, *MAIN_GRADS, ("layer", "experts"))),
    "overlapped": OVERLAP.but(settings=FUSED),
    "overlapped into main gradients": OVERLAP.but(settings=(*FUSED, *MAIN_GRADS)),
    "bf16 into main gradients": BASE.but(dtype="bfloat16", distributed_optimizer=True, settings=(*FUSED, *MAIN_GRADS)),
    "dense": BASE.but(
        ep=1,
        tp=2,
        etp=1,
        model=(
            ("num_moe_experts", None),
            ("moe_ffn_hidden_size", None),
            ("moe_z_loss_coeff", None),
            ("moe_aux_loss_coeff", 0.0),
        ),
    ),
}
SLOW = {
    "capacity, megablocks, fullest",
    "capacity, tutel, fullest",
    "recomputed activation",
    "sparse in megatron's layer",
    "scatter with main gradients",
    "fused in megatron's layer into main gradients",
    "bf16",
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Trained]:
    names = LAYOUTS.keys() - SLOW | set(harness.selected(request, SLOW))
    layouts = [(name, layout, STEPS) for name, layout in LAYOUTS.items() if name in names]
    return run_distributed_test(harness.train_all, 2, layouts)[0]


def _computed_places(layouts: dict[str, Layout]) -> dict[str, set[tuple[int, ...]]]:
    """The shapes (E_local, C, H) that the experts of each layout compute as padded bins in a step."""
    from megablocks.moe.experts import Experts

    found: dict[str, set[tuple[int, ...]]] = {}
    original = Experts.forward_padded
    for name, layout in layouts.items():
        shapes = found[name] = set()

        def record(self: Experts, bins: torch.Tensor, shapes: set[tuple[int, ...]] = shapes) -> torch.Tensor:
            shapes.add(tuple(bins.shape))
            return original(self, bins)

        Experts.forward_padded = record  # type: ignore[method-assign]
        try:
            harness.train_all([(name, layout, 1)])
        finally:
            Experts.forward_padded = original  # type: ignore[method-assign]
    return found


def test_a_padded_capacity_computes_all_its_places() -> None:
    """0.75 of 16 tokens' pairs, top-2, of each of two ranks, over four experts: 6 places a rank."""
    names = ("padded, megablocks", "padded, tutel", "capacity, megablocks", "dropless")
    for found in run_distributed_test(_computed_places, 2, {name: LAYOUTS[name] for name in names}):
        assert found == {"padded, megablocks": {(2, 12, 32)}, "padded, tutel": {(2, 12, 32)},
                         "capacity, megablocks": set(), "dropless": set()}  # fmt: skip


def _load(run: Trained) -> torch.Tensor:
    assert run.load is not None
    return run.load


@pytest.mark.parametrize("name", harness.parameters(LAYOUTS, SLOW))
def test_loss_falls(runs: dict[str, Trained], name: str) -> None:
    losses = runs[name].losses
    assert all(0 < loss < 6 for loss in losses)
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.1


def test_expert_choice_gives_every_expert_the_same_load(runs: dict[str, Trained]) -> None:
    load = _load(runs["expert choice"])
    assert (load[:, :-1] == PAIRS // 4).all() and not load[:, -1].any()


def test_a_forced_bias_skews_the_load(runs: dict[str, Trained]) -> None:
    for name, skewed in (("skewed load", True), ("dropless", False)):
        load = _load(runs[name])[:, :-1].double()
        assert ((load.amax(1) > 1.6 * load.mean(1)) == skewed).all(), name
    assert not _load(runs["skewed load"])[:, -1].any()


def test_R9_token_rounding_counts_the_routers_own_choice(runs: dict[str, Trained]) -> None:
    """The counts, also for the balancing losses, have K pairs a token, whatever rounding adds or drops."""
    load = _load(runs["token rounding"])
    assert (load[:, :-1].sum(1) == PAIRS).all()
    assert load[:, -1].any() and (load[:, -1] < PAIRS // 4).all()


def test_R9_capacity_drops_and_says_how_many(runs: dict[str, Trained]) -> None:
    for name in ("capacity, megablocks", "capacity, tutel", "capacity, tutel, capped"):
        load = _load(runs[name])
        assert (load[:, :-1].sum(1) == PAIRS).all(), "the load is counted before the drop"
        assert (load[:, -1] >= PAIRS // 4).all(), "at most three quarters of the pairs find a place"
        assert (load[:, -1] < PAIRS // 2).all()
    assert runs["capacity, tutel"].losses == runs["capacity, tutel, capped"].losses
    for name in ("capacity, megatron", "capacity, megatron's layer"):
        load = _load(runs[name])
        assert (load[:, -1] >= PAIRS // 4).all() and (load.sum(1) == PAIRS).all(), name


@pytest.mark.parametrize(
    "name", harness.parameters(["capacity, megablocks, fullest", "capacity, tutel, fullest"], SLOW)
)
def test_capacity_of_the_fullest_expert_is_dropless(runs: dict[str, Trained], name: str) -> None:
    assert runs[name].losses == runs["dropless"].losses
    assert not _load(runs[name])[:, -1].any()


@pytest.mark.skipif(HAS_TUTEL, reason="Tutel is installed")
def test_layer_tutel_without_tutel_is_ours_with_its_rule(runs: dict[str, Trained]) -> None:
    assert (_load(runs["layer tutel without the package"])[:, -1] > 0).all()


@pytest.mark.parametrize("name", ["our experts in megatron's layer", "megatron's layer"])
def test_megatrons_layer_trains_the_same(runs: dict[str, Trained], name: str) -> None:
    ours, theirs = runs["our layer, same model"], runs[name]
    if name != "megatron's layer":  # its parameters have other names and so other weights
        assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)
    assert (_load(theirs)[:, :-1].sum(1) == PAIRS).all()


@pytest.mark.parametrize("name", harness.parameters(["sparse", "sparse in megatron's layer"], SLOW))
def test_N6_block_sparse_experts_train_as_grouped_ones(runs: dict[str, Trained], name: str) -> None:
    grouped = runs["grouped, a block wide"]
    assert runs[name].losses == pytest.approx(grouped.losses, rel=1e-5)
    assert runs[name].norms == pytest.approx(grouped.norms, rel=1e-4)


@pytest.mark.parametrize("name", ["fused", "scatter"])
def test_N6_fused_and_scattered_experts_train_as_grouped_ones(runs: dict[str, Trained], name: str) -> None:
    assert runs[name].losses == pytest.approx(runs["dropless"].losses, rel=1e-5)
    assert runs[name].norms == pytest.approx(runs["dropless"].norms, rel=1e-4)


@pytest.mark.parametrize(
    "name, plain",
    [
        ("fused into main gradients", "fused"),
        pytest.param("scatter with main gradients", "scatter", marks=pytest.mark.slow),
        ("recomputed into main gradients", "fused"),
        pytest.param("fused in megatron's layer into main gradients", "fused", marks=pytest.mark.slow),
        ("overlapped into main gradients", "overlapped"),
    ],
)
def test_N6_gradients_added_by_the_experts_are_those_that_the_hook_adds(
    runs: dict[str, Trained], name: str, plain: str
) -> None:
    """Two micro-batches a step: with and without fusion, float32 gradients of the second add to the first."""
    assert runs[name].losses == pytest.approx(runs[plain].losses, rel=1e-6)
    assert runs[name].norms == pytest.approx(runs[plain].norms, rel=1e-5)


@pytest.mark.parametrize("name", harness.parameters(["recomputed activation"], SLOW))
def test_recomputed_activation_changes_nothing(runs: dict[str, Trained], name: str) -> None:
    assert runs[name].losses == pytest.approx(runs["dropless"].losses, rel=1e-6)


@pytest.mark.parametrize("name", harness.parameters(["bf16", "bf16 into main gradients"], SLOW))
def test_bf16_follows_float32(runs: dict[str, Trained], name: str) -> None:
    assert runs[name].losses == pytest.approx(runs["dropless"].losses, rel=0.03)


@pytest.mark.parametrize(
    ("padded", "ragged"),
    [
        ("padded, megablocks", "capacity, megablocks"),
        ("padded, megablocks, fullest", "dropless"),
        ("padded, tutel", "capacity, tutel"),
    ],
)
def test_empty_places_that_are_computed_change_nothing(runs: dict[str, Trained], padded: str, ragged: str) -> None:
    assert runs[padded].losses == pytest.approx(runs[ragged].losses, rel=1e-5)
    assert torch.equal(_load(runs[padded]), _load(runs[ragged]))
