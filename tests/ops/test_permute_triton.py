"""Token movement kernels against their references, on the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megablocks.ops.permute.padded_triton import pad_launch
from megablocks.ops.permute.permute_triton import combine_backward_launch, combine_launch, expand_launch
from megablocks.ops.permute.rows import combine_backward_ref, combine_ref, gather_ref
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch_ref, pad_indices_ref
from ops.far_rows import far_rows

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 is wrong on the interpreter where a store rounds; it is tested on a GPU
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def _dispatch(num_tokens: int, num_experts: int, top_k: int, drop: bool) -> tuple[Dispatch, int]:
    torch.manual_seed(num_tokens)
    token = torch.arange(num_tokens).repeat_interleave(top_k)
    expert = torch.randint(-1 if drop else 0, num_experts, token.shape)
    dispatch = Dispatch(*build_dispatch_ref(token.to(DEVICE), expert.to(DEVICE), num_tokens, num_experts))
    return dispatch, int(dispatch.expert_offsets[-1])


def _every_second(sizes: list[tuple[int, int, int]], kinds: Sequence[Any]) -> list[Any]:
    """Each size with each kind. The interpreter takes every second one by default, a GPU and --all take the others."""
    slow = pytest.mark.slow
    return [
        pytest.param(*size, kind, marks=slow if (i + j) % 2 else ())
        for i, size in enumerate(sizes)
        for j, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "top_k", "drop"),
    _every_second(
        [(1, 8, 1), (7, 20, 2), (5, 2100, 3), (33, 129, 5), (6, 768, 1), (2, 4200, 2), (3, 1536, 3), (3, 3072, 2)],
        (False, True),
    ),
)
def test_R7_permute_kernels_equal_references(
    num_tokens: int, hidden: int, top_k: int, drop: bool, dtype: torch.dtype, poison: None
) -> None:
    d, used = _dispatch(num_tokens, 4, top_k, drop)
    x = torch.randn(num_tokens, hidden, device=DEVICE, dtype=dtype)
    rows = expand_launch(x, d)
    assert torch.equal(rows[:used], gather_ref(x, d)[:used])

    weight = torch.rand(d.pair.shape[0], device=DEVICE)
    rows = torch.randn(d.pair.shape[0], hidden, device=DEVICE, dtype=dtype)
    rows[used:] = float("nan")  # rows without a pair are never read
    tolerance = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    for w in (weight, None):
        y = combine_launch(rows, w, d)
        expected = combine_ref(rows.nan_to_num(), w, d)
        torch.testing.assert_close(y, expected, **tolerance)

    dy = torch.randn(1, hidden, device=DEVICE, dtype=dtype).expand(num_tokens, hidden)  # stride 0
    for saved in (rows, None):
        d_rows, d_weight = combine_backward_launch(dy, saved, weight, d)
        clean = None if saved is None else rows.nan_to_num()
        expected_rows, expected_weight = combine_backward_ref(dy, clean, weight, d)
        torch.testing.assert_close(d_rows[:used], expected_rows[:used], **tolerance)
        if saved is None:
            assert d_weight is None
        else:
            torch.testing.assert_close(d_weight, expected_weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "top_k", "kind"),
    _every_second(
        [(1, 8, 1), (7, 20, 2), (3, 1300, 3), (33, 129, 5), (5, 192, 3)],
        ("padded", "short", "binned", "binned, pairs behind the bins"),
    ),
)
def test_R9_padded_kernels_equal_references(
    num_tokens: int, hidden: int, top_k: int, kind: str, dtype: torch.dtype, poison: None
) -> None:
    d, _ = _dispatch(num_tokens, 4, top_k, kind in ("padded", "short"))
    room = {"padded": (d.expert_offsets.diff() + 7) // 8 * 8, "short": torch.tensor([2, 0, 9, 1], device=DEVICE)}
    padded_ends, capacity, num_rows = None, 3, 12
    if kind in room:
        padded_ends = room[kind].cumsum(0).int()
        num_rows = int(padded_ends[-1]) + 5
    if kind.endswith("behind the bins"):
        d = d._replace(expert_offsets=d.expert_offsets.clamp(max=int(d.expert_offsets[-1]) // 2))
    args = (d, padded_ends, capacity, num_rows)
    found, expected = pad_launch(*args), pad_indices_ref(*args)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    p = Dispatch(d.expert_offsets, d.token_offsets, *found, True)

    x = torch.randn(num_tokens, hidden, device=DEVICE, dtype=dtype)
    assert torch.equal(expand_launch(x, p), gather_ref(x, p))
    weight = torch.rand(d.pair.shape[0], device=DEVICE)
    rows = torch.randn(num_rows, hidden, device=DEVICE, dtype=dtype)
    clean = rows.clone()
    rows[p.pair < 0] = float("nan")  # padding is never read
    tolerance = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(combine_launch(rows, weight, p), combine_ref(clean, weight, p), **tolerance)
    d_rows, d_weight = combine_backward_launch(x, rows, weight, p)
    expected_rows, expected_weight = combine_backward_ref(x, clean, weight, p)
    torch.testing.assert_close(d_rows, expected_rows, **tolerance)
    torch.testing.assert_close(d_weight, expected_weight, rtol=1e-4, atol=1e-3)


def test_N4_rows_past_two_to_the_31_elements() -> None:
    """Row · stride overflows int32 at row 2, of what is gathered and of the gradient that comes back."""
    d, used = _dispatch(3, 4, 2, False)
    x = torch.randn(3, 16, device=DEVICE, dtype=torch.float16)
    far = far_rows(x)
    assert used == 6 and torch.equal(expand_launch(far, d), gather_ref(x, d))
    rows, weight = torch.randn(6, 16, device=DEVICE, dtype=torch.float16), torch.rand(6, device=DEVICE)
    near = combine_backward_launch(x, rows, weight, d)
    for a, b in zip(combine_backward_launch(far, rows, weight, d), near, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
