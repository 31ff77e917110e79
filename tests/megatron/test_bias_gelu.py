"""Our bias and gelu in Megatron's dense layers, on a CPU, against Megatron's own: steps, and which calls it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from harness import Layout

from megablocks.testing.launcher import run_distributed_test

DENSE = ("num_moe_experts", None), ("moe_ffn_hidden_size", None), ("moe_aux_loss_coeff", 0.0), ("add_bias_linear", True)
GELU = Layout(layers=2, model=(*DENSE, ("bias_activation_fusion", True)))
CASES: dict[str, tuple[Layout, int]] = {  # and the calls of our op in a forward pass
    "float32": (GELU, 2),
    "bf16": (GELU.but(dtype="bfloat16"), 2),
    "layers recomputed": (GELU.but(recompute="full"), 4),
    "no fusion": (GELU.but(model=DENSE), 0),
}


@contextlib.contextmanager
def _on_cpu() -> Iterator[mock.Mock]:
    """The wrapper is installed and calls our op on a CPU too. Yields the op, which counts its calls."""
    from megatron.core.transformer import mlp

    from megablocks.megatron import bias_gelu

    plain = mlp.bias_gelu_impl
    with (
        mock.patch.object(mlp, "bias_gelu_impl", lambda x, bias: bias_gelu.apply(plain, x, bias)),
        mock.patch.object(bias_gelu, "runs_triton", lambda x: True),
        mock.patch.object(bias_gelu, "activate_biased", wraps=bias_gelu.activate_biased) as op,
    ):
        yield op


def _calls() -> dict[str, Any]:
    """What `apply` computes itself and what it leaves to Megatron's function, and where it is installed."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from megatron.core.transformer import mlp

    from megablocks.megatron import bias_gelu

    x, bias, dy = torch.randn(5, 2, 48), torch.randn(48), torch.randn(5, 2, 48)
    found: dict[str, Any] = {}

    def step(run: Any) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, bias)]
        y = run(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    found["Megatron's"] = step(bias_gelu_impl)
    with _on_cpu() as op:
        found["ours"], found["calls of ours"] = step(mlp.bias_gelu_impl), op.call_count
        found["another dtype"] = mlp.bias_gelu_impl(x.bfloat16(), bias).dtype, op.call_count
    with mock.patch.object(bias_gelu, "activate_biased") as op:
        found["without a GPU"] = bias_gelu.apply(lambda *given: len(given), x, bias), op.call_count
    from megablocks.megatron.specs import block_spec

    on_gpu = mock.patch.object(torch.cuda, "is_available", lambda: True)
    with on_gpu, mock.patch.object(bias_gelu, "install") as install:
        for kind in ("megatron", "fused"):
            block_spec(harness.transformer_config(GELU.but(settings=(("bias_gelu", kind),))))
            found[f"installed, {kind}"] = install.call_count
    bias_gelu.install()
    bias_gelu.install()
    found["wrapped once"] = mlp.bias_gelu_impl.__wrapped__ is bias_gelu_impl
    return found


def _measure() -> dict[str, Any]:
    harness.initialize(GELU)
    torch.manual_seed(4)
    found: dict[str, Any] = {}
    for name, (layout, _) in CASES.items():
        theirs = harness.train(layout, 2, weights=True)
        with _on_cpu() as op:
            found[name] = theirs, harness.train(layout, 2, weights=True), op.call_count
    return found | _calls()


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return run_distributed_test(_measure, 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_megatrons(measured: dict[str, Any], case: str) -> None:
    layout, calls = CASES[case]
    theirs, ours, count = measured[case]
    assert count == 2 * harness.GLOBAL_BATCH * calls
    limit = 0.02 if layout.dtype == "bfloat16" else 1e-5
    assert ours.losses == pytest.approx(theirs.losses, rel=limit)
    error, where = harness.worst_difference(*(harness.assemble([run.weights], 1e-4) for run in (ours, theirs)))
    assert error < limit, where


def test_values_and_gradients_equal_megatrons(measured: dict[str, Any]) -> None:
    for got, expected in zip(measured["ours"], measured["Megatron's"], strict=True):
        torch.testing.assert_close(got, expected)
    assert measured["calls of ours"] == 1


def test_other_calls_stay_megatrons(measured: dict[str, Any]) -> None:
    assert measured["another dtype"] == (torch.float32, 1), "a bias in float32 makes the result float32"
    assert measured["without a GPU"] == (2, 0)


def test_the_setting_installs_it_once(measured: dict[str, Any]) -> None:
    assert measured["installed, megatron"] == 0 and measured["installed, fused"] == 1
    assert measured["wrapped once"]
