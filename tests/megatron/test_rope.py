"""Our rotary embedding in Megatron against Megatron's own: values, gradients, and which calls it takes."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch

from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import relative_error

S, B, N, D = 7, 2, 3, 20
CASES: dict[str, dict[str, Any]] = {
    "halves": {},
    "neighbors": {"rotary_interleaved": True},
    "60 percent": {"percent": 0.6},
    "60 percent, neighbors, scaled": {"percent": 0.6, "rotary_interleaved": True, "mscale": 1.3},
}
LEFT: dict[str, dict[str, Any]] = {
    "turned off": {"settings": (("rope", "megatron"),)},
    "packed": {"packed": True},
    "angles of each sequence": {"batched": True},
}
"""Calls that stay Megatron's."""


def _compare(case: dict[str, Any]) -> tuple[float, float, int]:
    """The error of `apply`, that of the kernel or reference, and how often `apply` asks our op."""
    from unittest import mock

    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megablocks.megatron import rope
    from megablocks.ops.rope_triton import rope_launch

    interleaved, scale = case.get("rotary_interleaved", False), case.get("mscale", 1.0)
    model = (("kv_channels", D), ("rotary_interleaved", interleaved))
    config = harness.transformer_config(harness.Layout(model=model, settings=case.get("settings", ())))
    group = parallel_state.get_context_parallel_group()
    angles = RotaryEmbedding(
        D, case.get("percent", 1.0), interleaved, use_cpu_initialization=True, cp_group=group
    )(S, packed_seq=False)  # fmt: skip
    qkv = torch.randn(S, B, N, 3 * D)
    options: dict[str, Any] = {"config": config, "mscale": scale, "cp_group": group}
    if "batched" in case:
        angles = angles.expand(S, B, 1, D).contiguous()
    if "packed" in case:
        qkv, options["cu_seqlens"] = qkv[:, 0], torch.tensor([0, 4, S])
    dy = torch.randn(*qkv.shape[:-1], D)

    def step(run: Any, *more: Any) -> list[torch.Tensor]:
        x = qkv.clone().requires_grad_()
        y = run(*more, x[..., D : 2 * D], angles, **options)
        return [y, *torch.autograd.grad(y, x, dy)]

    theirs = step(apply_rotary_pos_emb)
    with mock.patch.object(rope, "rope", wraps=rope.rope) as op:
        ours = step(rope.apply, apply_rotary_pos_emb)
    of_kernel = 0.0
    if op.call_count:
        flat = angles.reshape(S, -1)
        x = qkv[..., D : 2 * D]
        gradient = theirs[1][..., D : 2 * D]
        of_kernel = max(
            relative_error(rope_launch(x, flat, interleaved, scale, False), theirs[0].double()),
            relative_error(rope_launch(dy, flat, interleaved, scale, True), gradient.double()),
        )
    return max(relative_error(a, b.double()) for a, b in zip(ours, theirs, strict=True)), of_kernel, op.call_count


def _train(kind: str, interleaved: bool) -> tuple[harness.Trained, int]:
    """Two steps, and how often they ask our op."""
    from unittest import mock

    from megablocks.megatron import rope

    model = (("rotary_interleaved", interleaved), ("num_query_groups", 2))
    with mock.patch.object(rope, "rope", wraps=rope.rope) as op:
        return harness.train(harness.Layout(layers=2, model=model, settings=(("rope", kind),)), 2), op.call_count


def _measure() -> dict[str, Any]:
    from megatron.core.transformer import attention

    from megablocks.megatron import rope

    harness.initialize(harness.Layout())
    torch.manual_seed(4)
    out: dict[str, Any] = {name: _compare(case) for name, case in (CASES | LEFT).items()}
    before = attention.apply_rotary_pos_emb
    rope.install()
    rope.install()
    out["installed once"] = attention.apply_rotary_pos_emb.__wrapped__ is before
    for interleaved in (False, True):
        out[f"trained, {interleaved}"] = [_train(kind, interleaved) for kind in ("fused", "megatron")]
    return out


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return run_distributed_test(_measure, 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_megatrons(measured: dict[str, Any], case: str) -> None:
    error, of_kernel, calls = measured[case]
    assert error <= 1e-6 and of_kernel <= 1e-6 and calls == 1


@pytest.mark.parametrize("case", LEFT)
def test_other_calls_stay_megatrons(measured: dict[str, Any], case: str) -> None:
    error, _, calls = measured[case]
    assert error == 0 and calls == 0


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_model_trains_as_with_megatrons(measured: dict[str, Any], interleaved: bool) -> None:
    (fused, calls), (plain, none) = measured[f"trained, {interleaved}"]
    assert measured["installed once"] and none == 0
    assert calls == 2 * harness.GLOBAL_BATCH * 2 * 2  # steps, micro-batches, layers, queries and keys
    assert fused.losses == pytest.approx(plain.losses, rel=1e-5)
    error, tensor = harness.worst_difference(harness.assemble([fused.grads]), harness.assemble([plain.grads]))
    assert error <= 1e-5, f"gradient of {tensor}"
