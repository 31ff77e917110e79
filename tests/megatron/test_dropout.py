"""Our dropout in Megatron's layers: which calls it takes, what it drops, what recomputation draws."""

from __future__ import annotations

from typing import Any
from unittest import mock

import harness
import pytest
import torch

from megablocks.testing.launcher import run_distributed_test

P = 0.25
CALLS = {  # training, fused, prob
    "training": (True, True, P),
    "not fused": (True, False, P),
    "evaluation": (False, True, P),
    "no dropout": (True, True, 0.0),
}


def _train(recompute: str) -> tuple[harness.Trained, int]:
    """A step with our spec of a GPU, and how often our op ran."""
    from megablocks.megatron import dropout, specs

    original = specs.block_spec

    def of_a_gpu(*args: Any, **options: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return original(*args, **options)

    model = (("hidden_dropout", P), ("bias_dropout_fusion", True))
    with (
        mock.patch.object(specs, "block_spec", of_a_gpu),
        mock.patch.object(dropout, "dropout_add", wraps=dropout.dropout_add) as op,
    ):
        return harness.train(harness.Layout(layers=2, recompute=recompute, model=model), 1), op.call_count


def _measure() -> dict[str, Any]:
    from megablocks.megatron import dropout

    harness.initialize(harness.Layout())
    torch.compiler.set_stance("force_eager")  # Megatron's own function would be compiled
    out: dict[str, Any] = {}
    x, bias, residual = torch.full((50, 4, 100), 2.0), torch.ones(100), torch.full((50, 4, 100), 10.0)
    for name, (training, fused, prob) in CALLS.items():
        with mock.patch.object(dropout, "dropout_add", wraps=dropout.dropout_add) as op:
            y = dropout.bias_dropout_add(training, fused)((x.clone(), bias), residual.clone(), prob)
        values, counts = y.unique(return_counts=True)
        out[name] = op.call_count, dict(zip(values.tolist(), (counts / y.numel()).tolist(), strict=True))
    return out | {f"trained {recompute}": _train(recompute) for recompute in ("", "full")}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return run_distributed_test(_measure, 1)[0]


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_bias_dropout_and_residual(measured: dict[str, Any], name: str) -> None:
    calls, shares = measured[name]
    training, _, prob = CALLS[name]
    dropped = prob if training else 0.0
    expected = {10 + 3 / (1 - dropped): 1 - dropped} | ({10.0: dropped} if dropped else {})
    assert shares == pytest.approx(expected, abs=0.02)  # more than six standard deviations
    assert calls == (name == "training")


def test_recomputation_draws_the_same_numbers(measured: dict[str, Any]) -> None:
    (plain, calls), (recomputed, more) = measured["trained "], measured["trained full"]
    assert calls == harness.GLOBAL_BATCH * 2 * 2 and more == 2 * calls  # micro-batches, layers, places in a layer
    assert recomputed.losses == pytest.approx(plain.losses, rel=1e-6)
    error, tensor = harness.worst_difference(harness.assemble([recomputed.grads]), harness.assemble([plain.grads]))
    assert error <= 1e-5, f"gradient of {tensor}"


def test_specs_place_it_on_a_gpu_unless_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megablocks.megatron.settings import MegaBlocksSettings
    from megablocks.megatron.specs import _our_layer

    config, found = harness.transformer_config(harness.Layout()), []
    for on_gpu, value in ((True, "fused"), (True, "megatron"), (False, "fused")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        parts = _our_layer(get_gpt_layer_local_spec(), config, MegaBlocksSettings(dropout=value)).submodules
        found.append((parts.self_attn_bda.__name__, parts.mlp_bda.__name__))
    assert found == [("bias_dropout_add",) * 2, ("get_bias_dropout_add",) * 2, ("get_bias_dropout_add",) * 2]
