"""The selection of token rounding: kernels (interpreted without a GPU) and reference, against a sort in Python."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.launch import interpreted
from megablocks.ops.routing import rounding_triton
from megablocks.ops.routing.rounding import place_ref, rank_order
from megablocks.ops.routing.rounding_triton import flags_launch, place_launch
from megablocks.testing.poison import poisoned_empty

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"


@pytest.fixture(params=["kernel", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernel = request.param == "kernel"
    if kernel and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    monkeypatch.setattr(rounding_triton, "_BLOCK", 16)  # several to a column here, too
    return request.param


def select(backend, weights, ids, loads, padding, num_pairs):
    """token, expert and weight (R,) of the first loads[e] tokens of every expert's order."""
    chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, ids, True)
    if backend == "reference":
        kept = torch.zeros_like(chosen)
        kept.scatter_(0, rank_order(weights, chosen, padding), torch.arange(len(weights))[:, None] < loads)
        token, expert, source = place_ref(kept, num_pairs)
        unused = source[expert < 0].tolist()
        assert len(set(unused)) == len(unused)  # the zeros of their gradients do not queue at one place
        return token, expert, torch.where(expert >= 0, weights.flatten()[source], 0.0)
    bits = weights.nan_to_num(0.0).view(torch.int32)
    keys = torch.where(chosen, bits, bits + (1 - 2**31)).masked_fill(padding.unsqueeze(1), -(2**31)).t().contiguous()
    flags, ends = flags_launch(keys.to(DEVICE), loads.to(DEVICE))
    return place_launch(flags, ends, num_pairs, weights.to(DEVICE))


def by_sorting(weights, ids, loads, padding):
    pairs = []
    for e, load in enumerate(loads.tolist()):
        keyed = []
        for t in range(len(weights)):
            weight = float(weights[t, e])
            chosen = e in ids[t].tolist()
            keyed.append((bool(padding[t]), not chosen, 0.0 if weight != weight else -weight, t))
        pairs += [(t, e) for *_, t in sorted(keyed)[:load]]
    return sorted(pairs)


@pytest.mark.parametrize("tokens,experts,k,ties,padded", [
    (1, 1, 1, False, False), (37, 5, 2, True, True), (37, 5, 2, False, False), (70, 3, 3, True, False),
    (5, 19, 1, False, True),
])  # fmt: skip
def test_R5_first_tokens_of_every_order(backend, tokens, experts, k, ties, padded):
    """Loads from 0 to all tokens, equal weights, NaN, 0 and 1 among them."""
    draw = torch.Generator().manual_seed(tokens)
    weights = torch.rand(tokens, experts, generator=draw)
    if ties:
        weights = weights.mul(4).round().div(4)
    weights[tokens // 2] = float("nan")
    ids = weights.nan_to_num(0).topk(k, dim=1).indices
    padding = torch.arange(tokens) % 4 == 3 if padded else torch.zeros(tokens, dtype=torch.bool)
    most = int((~padding).sum())
    loads = torch.randint(0, most + 1, (experts,), generator=draw)
    loads[0] = most
    expected = by_sorting(weights, ids, loads, padding)
    num_pairs = min(len(expected) + 5, tokens * experts)
    with poisoned_empty():
        token, expert, weight = select(backend, weights, ids, loads, padding, num_pairs)
    got = list(zip(token.tolist(), expert.tolist(), strict=True))
    used = len(expected)
    assert got[:used] == expected and got[used:] == [(tokens - 1, -1)] * (num_pairs - used)
    wanted = torch.tensor([float(weights[t, e]) for t, e in expected] + [0.0] * (num_pairs - used))
    assert torch.equal(weight.cpu().nan_to_num(-1.0), wanted.nan_to_num(-1.0))
