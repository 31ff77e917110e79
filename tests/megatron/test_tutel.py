"""Tutel's own layer in our specs, where Tutel is installed (third_party/fetch.sh Tutel, then pip install it)."""

from __future__ import annotations

import importlib.util

import harness
import pytest
from harness import Layout, Trained

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tutel") is None, reason="needs Tutel: see third_party/pins.txt"
)
STEPS = 10
BASE = Layout(layers=2, model=(("moe_z_loss_coeff", None),), settings=(("layer", "tutel"), ("capacity_factor", 0.0)))
LAYOUTS = {"alone": BASE, "capped": BASE.but(settings=(("layer", "tutel"), ("capacity_factor", 0.5)))}
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
