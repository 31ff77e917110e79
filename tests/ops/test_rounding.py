"""The selection of token rounding: kernels (interpreted without a GPU) and reference, against a sort in Python."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.launch import interpreted
from megablocks.ops.routing import rounding, rounding_triton
from megablocks.ops.routing.rounding import select_tokens
from megablocks.testing.poison import poisoned_empty

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"


@pytest.fixture(params=["kernel", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernel = request.param == "kernel"
    if kernel and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    monkeypatch.setattr(rounding, "runs_triton", lambda t: kernel)
    monkeypatch.setattr(rounding_triton, "_BLOCK", 16)  # several to a column here, too
    return request.param


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
        token, expert, source = select_tokens(
            weights.to(DEVICE), ids.to(DEVICE), loads.to(DEVICE), num_pairs,
            padding_mask=torch.stack([padding, ~padding], 1).to(DEVICE)[:, 0] if padded else None,
        )  # fmt: skip
    got = list(zip(token.tolist(), expert.tolist(), strict=True))
    used = len(expected)
    assert got[:used] == expected and got[used:] == [(tokens - 1, -1)] * (num_pairs - used)
    assert source.tolist()[:used] == [t * experts + e for t, e in expected]
    assert len(set(source.tolist()[used:])) == num_pairs - used and all(s < tokens * experts for s in source.tolist())


def test_L2_select_tokens_refuses():
    weights, ids, loads = torch.rand(4, 3), torch.zeros(4, 1, dtype=torch.long), torch.ones(3, dtype=torch.long)
    for args, options, message in (
        ((weights, ids, loads, 13), {}, "num_pairs=13"),
        ((weights, ids[1:], loads, 3), {}, r"ids \(3, 1\)"),
        ((weights, ids, loads[1:], 3), {}, r"loads \(2,\)"),
        ((weights, ids, loads, 3), {"padding_mask": torch.zeros(3, dtype=torch.bool)}, r"^padding_mask is \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            select_tokens(*args, **options)
