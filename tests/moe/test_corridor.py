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
