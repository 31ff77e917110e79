"""The gate of the benchmark beside transformers: a small model on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import hugging_face  # noqa: E402
from measure import Gate  # noqa: E402


def test_the_gate_sees_a_wrong_gradient() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    hugging_face.register()
    right = ALL_EXPERTS_FUNCTIONS["megablocks_grouped"]

    def wrong(*args: Any) -> Any:
        y = right(*args)
        return 2 * y.detach() - y  # the same output

    ALL_EXPERTS_FUNCTIONS.register("megablocks_fused", wrong)
    try:
        gate = Gate(ours=lambda arm: arm in hugging_face.OURS)
        hugging_face.check(hugging_face.make_model(1, toy=True), gate)
    finally:
        hugging_face.register()
    assert {"grouped_mm", "megablocks", "megablocks_grouped", "megablocks_few"} <= gate.errors.keys()
    assert not gate.green and "megablocks_fused" not in gate.errors
