"""The counting sort behind build_dispatch against its reference, on the interpreter and on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from megablocks.ops.routing import dispatch_triton
from megablocks.ops.routing.dispatch import build_dispatch_ref

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _pairs(
    rng: random.Random, num_tokens: int, num_experts: int, top_k: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if top_k:
        token = torch.arange(num_tokens).repeat_interleave(top_k)
    else:
        token = torch.randint(num_tokens, (rng.choice([1, 7, 60]),)).sort().values
    if kind == "all invalid":
        expert = torch.full(token.shape, -1)
    elif kind == "one expert":
        expert = torch.full(token.shape, num_experts - 1)
    else:
        low, high = (-1, num_experts + 1) if kind == "some invalid" else (0, num_experts)
        expert = torch.randint(low, high, token.shape)
    return token.int().to(DEVICE), expert.int().to(DEVICE)


@pytest.mark.parametrize("kind", ["valid", "some invalid", "all invalid", "one expert"])
def test_R7_counting_sort_equals_reference(kind: str, monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    monkeypatch.setattr(dispatch_triton, "_CHUNK", 16)
    rng = random.Random(kind)
    torch.manual_seed(rng.randrange(1 << 30))
    for _ in range(8):
        num_tokens, num_experts = rng.choice([1, 3, 40]), rng.choice([1, 2, 5, 16])
        top_k = rng.choice([0, 1, 2, 5])
        token, expert = _pairs(rng, num_tokens, num_experts, top_k, kind)
        expected = build_dispatch_ref(token, expert, num_tokens, num_experts)
        found = dispatch_triton.dispatch_launch(token, expert, num_tokens, num_experts)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other), (num_tokens, num_experts, top_k)


def test_R8_every_second_id(poison: None) -> None:
    """The first choice of two, `ids[:, :1]`, keeps its stride through make_routing."""
    pairs = torch.tensor([[2, 0], [0, 9], [1, 9], [2, 9], [0, 9]], dtype=torch.int32, device=DEVICE)
    token, expert = torch.arange(5, dtype=torch.int32, device=DEVICE), pairs[:, :1].flatten()
    assert expert.stride() == (2,)
    wide = torch.stack([token, token], 1)[:, 0]
    expected = build_dispatch_ref(token, expert, 5, 3)
    found = dispatch_triton.dispatch_launch(wide, expert, 5, 3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
