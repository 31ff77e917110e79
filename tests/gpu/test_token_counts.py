"""No layer compiles a kernel for a new token count. No GPU is needed: launches are recorded, and no kernel runs."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest

from gpu.test_families import ARCHITECTURE, in_another_process, tensors_pass_for_cuda

FIRST, *NEW = 32768, 0, 1, 13, 4109, 16384, 65536
SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 256, "num_experts": 8}
LAYERS: dict[str, dict[str, Any]] = {
    f"{impl}, {activation}": SIZES | {"mlp_impl": impl, "activation": activation} | more
    for impl in ("grouped", "sparse", "scatter", "fused")
    for activation, more in (
        ("gelu", {}),
        ("relu", {"top_k": 2, "mlp_bias": True, "recompute_activation": True}),
        ("swiglu", {"top_k": 2, "mlp_bias": True}),
    )
}
# with enough block columns for the other tiles of the block-sparse products
LAYERS["sparse, wide"] = {**LAYERS["sparse, gelu"], "hidden_size": 8, "num_experts": 1024}


def compiled_late(options: dict[str, Any]) -> list[str]:
    """The kernels, with token counts, that Triton would specialize anew after the step with FIRST tokens."""
    import torch
    from triton.runtime.jit import JITFunction

    from megablocks import MoEConfig, dMoE
    from megablocks.testing.compile_only import compiling_for

    forms: set[tuple[str, str]] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = self.device_caches[0]
        _, specialization, chosen = binder(*args, debug=False, instrumentation_mode="", **options)
        forms.add((f"{self.fn.__module__}.{self.fn.__name__}", f"{specialization} {chosen}"))

    def logits(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """The router's product is torch's own, and takes half of the time on a CPU."""
        return torch.zeros(x.shape[0], layer.out_features, dtype=x.dtype, requires_grad=True)

    layer = dMoE(MoEConfig(**options), dtype=torch.bfloat16)
    late = []
    with (
        compiling_for(ARCHITECTURE),
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(torch.nn.Linear, "forward", logits),
        tensors_pass_for_cuda(),
    ):
        for tokens in (FIRST, *NEW):
            x = torch.zeros(tokens, options["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
            known = set(forms)
            layer(x).float().sum().backward()
            assert forms, "no kernel was launched"
            late += [f"{kernel} at {tokens} tokens" for kernel, _ in sorted(forms - known) if tokens != FIRST]
    return late


@pytest.mark.parametrize("hopper", ["1", "0"])
def test_a_new_token_count_compiles_nothing(hopper: str) -> None:
    late = in_another_process(__file__, MEGABLOCKS_HOPPER=hopper)
    assert late == {name: [] for name in LAYERS}


if __name__ == "__main__":
    print(json.dumps({name: compiled_late(options) for name, options in LAYERS.items()}))
