"""The parts of a profiled step, by the names that Megatron gives its modules."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.training")

from megablocks.megatron import profiling  # noqa: E402
from megablocks.monitor.bounds import FORMULAS  # noqa: E402

LAYER = "module.module.decoder.layers.3."


@pytest.mark.parametrize(
    "name, part",
    [
        ("", "embedding and loss"),
        ("module.module.embedding", "embedding and loss"),
        ("module.module.output_layer", None),
        ("module.module.decoder", "elementwise"),
        ("module.module.rotary_pos_emb", "elementwise"),
        ("module.module.decoder.final_layernorm", "norms"),
        (LAYER + "pre_mlp_layernorm", "norms"),
        (LAYER + "self_attention", None),
        (LAYER + "self_attention.core_attention", "attention"),
        (LAYER + "self_attention.linear_qkv", "dense products"),
        (LAYER + "mlp.linear_fc2", "dense products"),
        (LAYER + "mlp.router", "routing"),
        (LAYER + "mlp.experts.core", "experts"),
        (LAYER + "mlp.experts.local_experts.0.linear_fc1", "experts"),
        (LAYER + "mlp.shared_experts.linear_fc1", "dense products"),
    ],
)
def test_part_of_a_module(name: str, part: str | None) -> None:
    assert profiling.part_of(name, torch.nn.Module()) == part
    assert part is None or part in FORMULAS


def test_a_layer_with_a_router_belongs_to_the_experts() -> None:
    layer = torch.nn.Module()
    layer.router = torch.nn.Module()
    assert profiling.part_of(LAYER + "mlp", layer) == "experts"
