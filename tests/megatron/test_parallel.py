"""Every parallel layout trains as one process does: gradients of one step, norms, losses and loads of three."""

from __future__ import annotations

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Layout, Trained

STEPS = 3
Runs = dict[str, list[Trained]]  # by layout, then by rank
PLAIN = Layout(layers=2, model=(("moe_shared_expert_intermediate_size", 32),))
DEEP = PLAIN.but(layers=4)
DEEPSEEK = Layout(
    model=(
        ("activation_func", F.silu),
        ("gated_linear_unit", True),
        ("normalization", "RMSNorm"),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_num_groups", 2),
        ("moe_router_group_topk", 1),
        ("moe_router_load_balancing_type", "seq_aux_loss"),
        ("moe_layer_freq", [0, 1, 0, 1]),
        ("num_query_groups", 2),
    )
)
BIASES = Layout(layers=2, model=(("add_bias_linear", True), ("bias_activation_fusion", False)))
LONELY = Layout(  # every token goes to experts 0 and 1
    layers=2,
    expert_bias=(9.0, 9.0, 0.0, 0.0),
    model=(("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True)),
)
SEQ_LOSS = Layout(  # this loss is a mean over sequences, so it is equal for every micro-batch size
    layers=2, model=(("moe_router_load_balancing_type", "seq_aux_loss"),)
)

ALONE = {
    "plain": PLAIN,
    "deep": DEEP,
    "deepseek": DEEPSEEK,
    "biases": BIASES,
    "lonely": LONELY,
    "seq": SEQ_LOSS,
    "seq, micro-batches of 2": SEQ_LOSS.but(micro_batch=2),
}
SPREAD = {  # name: (layout of 4 ranks, its reference in ALONE)
    "ep2": (PLAIN.but(ep=2), "plain"),
    "ep4": (PLAIN.but(ep=4), "plain"),
    "ep2 distributed optimizer": (PLAIN.but(ep=2, distributed_optimizer=True), "plain"),
    "ep2 overlapped": (PLAIN.but(ep=2, distributed_optimizer=True, overlap=True), "plain"),
    "pp2 ep2": (PLAIN.but(pp=2, ep=2), "plain"),
    "pp2 vpp2 ep2": (DEEP.but(pp=2, vpp=2, ep=2), "deep"),
    "tp2 etp2 ep2": (PLAIN.but(tp=2, etp=2, ep=2), "plain"),
    "tp2 etp1 ep2": (PLAIN.but(tp=2, etp=1, ep=2), "plain"),
    "tp2 etp2 pp2 distributed optimizer": (PLAIN.but(tp=2, etp=2, pp=2, distributed_optimizer=True), "plain"),
    "ep2 full recompute": (PLAIN.but(ep=2, recompute="full"), "plain"),
    "ep2 selective recompute": (PLAIN.but(ep=2, recompute="moe,core_attn,shared_experts"), "plain"),
    "deepseek pp2 ep2 distributed optimizer": (DEEPSEEK.but(pp=2, ep=2, distributed_optimizer=True), "deepseek"),
    "deepseek tp2 etp1 ep4": (DEEPSEEK.but(tp=2, etp=1, ep=4), "deepseek"),
    "biases tp2 etp1 ep2": (BIASES.but(tp=2, etp=1, ep=2), "biases"),
    "lonely ep2": (LONELY.but(ep=2), "lonely"),
    "lonely pp2 ep2 overlapped": (LONELY.but(pp=2, ep=2, distributed_optimizer=True, overlap=True), "lonely"),
    "seq pp2 ep2, micro-batches of 2": (SEQ_LOSS.but(pp=2, ep=2, micro_batch=2), "seq"),
    "seq ep4": (SEQ_LOSS.but(ep=4), "seq"),
}
SLOW = {  # other layouts have the same parts
    "ep2 distributed optimizer",
    "pp2 ep2",
    "tp2 etp2 pp2 distributed optimizer",
    "deepseek tp2 etp1 ep4",
    "lonely ep2",
    "seq ep4",
}


def _steps(layout: Layout) -> int:
    return STEPS if layout.model in (PLAIN.model, DEEPSEEK.model) and not layout.recompute else 2


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Runs:
    references = {SPREAD[name][1] for name in harness.selected(request, SPREAD)}
    names = references | set(harness.selected(request, ALONE))
    layouts = [(name, layout, STEPS) for name, layout in ALONE.items() if name in names]
    return harness.on_ranks(harness.train_all, 1, layouts)


@pytest.fixture(scope="module")
def spread(request: pytest.FixtureRequest) -> Runs:
    layouts = [(name, SPREAD[name][0], _steps(SPREAD[name][0])) for name in harness.selected(request, SPREAD)]
    return harness.on_ranks(harness.train_all, 4, layouts)


def _grads(runs: list[Trained]) -> dict[str, np.ndarray]:
    return harness.assemble([run.grads for run in runs])


def _check(runs: list[Trained], reference: Trained) -> None:
    run = runs[0]
    assert run.losses[0] == pytest.approx(reference.losses[0], rel=1e-5)
    error, name = harness.worst_difference(_grads(runs), _grads([reference]))
    assert error <= 1e-5, f"gradient of {name}"
    assert run.norms[0] == pytest.approx(reference.norms[0], rel=1e-5)
    assert reference.losses[-1] < reference.losses[0]
    for step, loss in enumerate(run.losses):
        assert loss == pytest.approx(reference.losses[step], rel=1e-4), f"loss of step {step}"
        assert run.aux[step] == pytest.approx(reference.aux[step], rel=1e-4), f"losses of the routers in step {step}"


@pytest.mark.parametrize("name", harness.parameters(SPREAD, SLOW))
def test_layout_trains_as_one_process(alone: Runs, spread: Runs, name: str) -> None:
    _check(spread[name], *alone[SPREAD[name][1]])


@pytest.mark.parametrize("name", harness.parameters(SPREAD, SLOW))
def test_load_of_all_ranks_and_stages_is_counted_once(spread: Runs, name: str) -> None:
    layout = SPREAD[name][0]
    expected = torch.full((layout.layers,), _steps(layout) * harness.GLOBAL_BATCH * harness.SEQ * 2)
    frequency = dict(layout.model).get("moe_layer_freq")
    if frequency is not None:
        expected *= torch.tensor(frequency)
    for run in spread[name]:
        assert run.load is not None
        assert torch.equal(run.load[:, :-1].sum(1), expected)
        assert not run.load[:, -1].any(), "dropless: nothing is dropped"


@pytest.mark.parametrize(
    "a, b",
    [
        ("seq", "seq, micro-batches of 2"),
        ("seq", "seq pp2 ep2, micro-batches of 2"),
        pytest.param("seq", "seq ep4", marks=pytest.mark.slow),
        pytest.param("plain", "pp2 ep2", marks=pytest.mark.slow),
        ("plain", "ep4"),
        ("deep", "pp2 vpp2 ep2"),
        ("plain", "ep2 full recompute"),
    ],
)
def test_N7_aux_and_z_loss_do_not_depend_on_the_split(alone: Runs, spread: Runs, a: str, b: str) -> None:
    runs = alone[b] if b in ALONE else spread[b]
    assert set(runs[0].aux[0]) >= {"z_loss"} and len(runs[0].aux[0]) == 2
    assert runs[0].aux[0] == pytest.approx(alone[a][0].aux[0], rel=1e-5)
    mine, reference = _grads(runs), _grads(alone[a])
    routers = [key for key in reference if key.endswith("router.weight")]
    assert routers
    for key in routers:
        assert np.linalg.norm(mine[key] - reference[key]) <= 1e-5 * np.linalg.norm(reference[key]), key


@pytest.mark.parametrize("name", ["ep2", "ep4", "tp2 etp1 ep2", "tp2 etp2 ep2"])
def test_N8_expert_gradients_are_not_multiplied_by_the_ranks(alone: Runs, spread: Runs, name: str) -> None:
    mine, reference = _grads(spread[name]), _grads(alone["plain"])
    experts = [key for key in reference if ".experts." in key]
    assert len(experts) == 2
    for key in experts:
        ratio = float((mine[key] * reference[key]).sum() / (reference[key] ** 2).sum())
        assert ratio == pytest.approx(1.0, abs=1e-5), key


@pytest.mark.parametrize("name", harness.parameters(["lonely ep2", "lonely pp2 ep2 overlapped"], SLOW))
def test_R3_zero_tokens_on_one_rank(alone: Runs, spread: Runs, name: str) -> None:
    _check(spread[name], *alone["lonely"])
    load = spread[name][0].load
    assert load is not None and not load[:, 2:4].any(), "experts 2 and 3 are on the rank that gets no token"
    for key, grad in _grads(spread[name]).items():
        if ".experts." in key:
            assert not grad[:, 2:].any() and grad[:, :2].any(), key
