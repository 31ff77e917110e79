"""The way of a token through the package is short: the files that a forward enters, and how often it changes file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import megablocks
from megablocks import MoEConfig, dMoE

PACKAGE = str(Path(megablocks.__file__).parent)
MOST_FILES, MOST_CHANGES = 14, 45


@pytest.mark.parametrize("impl", ["fused", "grouped", "sparse", "scatter"])
def test_a_warm_forward_enters_few_files(impl: str) -> None:
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=64, num_experts=4, top_k=2, activation="swiglu", mlp_impl=impl,
        load_balancing_loss_weight=0.1,
    )  # fmt: skip
    layer, x = dMoE(config, device="cpu", dtype=torch.float32), torch.randn(8, 16, requires_grad=True)
    layer.forward_with_aux(x)
    entered: list[str] = []

    def record(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        layer.forward_with_aux(x)
    finally:
        sys.setprofile(None)
    changes = sum(a != b for a, b in zip(entered, entered[1:], strict=False))
    files = {name.removeprefix(PACKAGE + "/") for name in entered}
    assert {"moe/layer.py", "moe/router.py", "moe/dispatchers.py", "moe/experts.py", "moe/impls.py"} <= files
    assert len(files) <= MOST_FILES and changes <= MOST_CHANGES, (len(files), changes, sorted(files))


@pytest.mark.parametrize("impl", ["fused", "grouped", "sparse", "scatter"])
def test_a_forward_without_gradients_pays_nothing_for_autograd(impl: str) -> None:
    """At 1 to 64 tokens: no op enters an autograd function or saves a tensor, and the output has training's bits."""
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=64, num_experts=4, top_k=2, activation="swiglu", mlp_impl=impl,
        gradient_accumulation_fusion=True,
    )  # fmt: skip
    layer = dMoE(config, device="cpu", dtype=torch.float32, expert_grad_scale=0.5)
    layer.experts.w1.main_grad = torch.zeros_like(layer.experts.w1)
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, 16)
        expected = layer(x)
        assert expected.requires_grad
        entered: set[str] = set()

        def record(frame, event, arg, entered=entered):
            # what autograd calls, and what saves for it, takes its context first
            if event == "call" and "ctx" in frame.f_code.co_varnames[:1]:
                entered.add(frame.f_code.co_qualname)

        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                sys.setprofile(record)
                try:
                    y = layer(x)
                finally:
                    sys.setprofile(None)
            assert torch.equal(y, expected) and not y.requires_grad
        assert not entered
