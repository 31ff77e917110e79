"""The projection with its bias inside the product against Megatron's own layer: values, gradients, which one runs."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch

from megablocks.testing.launcher import run_distributed_test

HIDDEN, WIDTH = 24, 40
CASES: dict[str, tuple[harness.Layout, dict[str, Any]]] = {
    "one rank": (harness.Layout(), {}),
    "gathered output": (harness.Layout(), {"gather_output": True}),
    "no bias": (harness.Layout(), {"bias": False}),
    "bias for the caller": (harness.Layout(), {"skip_bias_add": True}),
    "sequence parallel": (harness.Layout(tp=2, etp=1), {}),
    "tensor parallel": (harness.Layout(tp=2, etp=1, model=(("sequence_parallel", False),)), {}),
}
IN_PRODUCT = ["one rank", "gathered output"]


def _step(layer: Any, x: torch.Tensor, frozen: bool) -> tuple[list[torch.Tensor], bool]:
    """Output and gradients, and whether Megatron's function computed them."""
    x = x.clone().requires_grad_()
    layer.weight.requires_grad_(not frozen)
    out, bias = layer(x)
    node, megatrons = out.grad_fn, False
    while node is not None:
        megatrons |= "LinearWith" in node.name()
        node = next((following for following, _ in node.next_functions if following is not None), None)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    found = [out, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return found if bias is None else [*found, bias], megatrons


def _compare() -> dict[str, tuple[float, bool]]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megablocks.megatron.linear import BiasInProduct

    out = {}
    for name, (layout, options) in CASES.items():
        harness.initialize(layout)
        config = harness.transformer_config(layout)
        layers = [
            kind(
                HIDDEN, WIDTH, config=config, init_method=torch.nn.init.normal_,
                **{"bias": True, "gather_output": False, **options},
            )
            for kind in (ColumnParallelLinear, BiasInProduct)
        ]  # fmt: skip
        if layers[0].bias is not None:
            torch.nn.init.normal_(layers[0].bias)
        layers[1].load_state_dict(layers[0].state_dict())
        x = torch.randn(6, 3, HIDDEN)
        for frozen in (False, True):
            for layer in layers:
                layer.zero_grad()
            (theirs, plain), (ours, megatrons) = (_step(layer, x, frozen) for layer in layers)
            assert plain and len(ours) == len(theirs) >= 3 - frozen
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
            out[f"{name}{', frozen' * frozen}"] = error, megatrons
    return out


@pytest.fixture(scope="module")
def compared() -> list[dict[str, tuple[float, bool]]]:
    return run_distributed_test(_compare, 2)


@pytest.mark.parametrize("case", [name + frozen for name in CASES for frozen in ("", ", frozen")])
def test_values_and_gradients_equal_megatrons(compared: list[dict[str, tuple[float, bool]]], case: str) -> None:
    for rank in compared:
        error, megatrons = rank[case]
        assert error <= 1e-6
        assert megatrons == (case not in IN_PRODUCT)


def _placed() -> list[str]:
    """The class of linear_qkv with and without a GPU; in a rank, because the specs patch torch on a CPU."""
    from unittest import mock

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megablocks.megatron.settings import MegaBlocksSettings
    from megablocks.megatron.specs import _our_layer

    config, found = harness.transformer_config(harness.Layout()), []
    for on_gpu, value in ((True, "fused"), (True, "megatron"), (False, "fused")):
        with mock.patch.object(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu):
            layer = _our_layer(get_gpt_layer_local_spec(), config, MegaBlocksSettings(qkv_bias=value))
        found.append(layer.submodules.self_attention.submodules.linear_qkv.__name__)
    return found


def test_specs_place_it_on_a_gpu_unless_it_is_turned_off() -> None:
    (found,) = run_distributed_test(_placed, 1)
    assert found == ["BiasInProduct", "ColumnParallelLinear", "ColumnParallelLinear"]
