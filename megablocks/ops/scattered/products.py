"""The two grouped products behind `parallel_linear` and the scattered expert MLP; not differentiable by themselves.

    rows      y[out(p)] = gate(p) · (x[in(p)] · w[e] + bias[e])
              dots[pair(p)] = ⟨x[in(p)] · w[e], other[other(p)]⟩ + ⟨x[in(p)], dot_bias[e]⟩
    weights   o[e] = Σ_p a[a(p)]ᵀ · (gate(p) · b[b(p)])      sums[e] = Σ_p gate(p) · b[b(p)]

Legend: R rows, E experts, K inner size, N outer size. Row p belongs to expert e where ends[e-1] <= p < ends[e], with 0
before the first; rows from ends[E-1] on have no expert. An index that is None is the identity, and one with a fan reads
row in_index[p] // in_fan; gate(p) = gate[pair(p)], 1 without a gate. `rows` serves forward, and backward with wᵀ: there
x is the gradient of the output, `other` the input, and dots the gradients of the gates, so that no output is kept for
them (SonicMoE, arXiv 2512.14080, dS = ⟨dA′, A⟩). Source: ScatterMoE (arXiv 2403.08245).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.library import custom_op


def _at(index: Tensor | None, p: slice, fan: int) -> Tensor | slice:
    return p if index is None else index[p].long() // fan


def _segments(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(start, end)
        start = end


def scattered_rows_ref(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    num_rows: int,
    in_index: Tensor | None,
    in_fan: int,
    out_index: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    pair: Tensor | None,
    other: Tensor | None,
    other_index: Tensor | None,
    other_fan: int,
    dot_bias: Tensor | None,
    zero_tail: bool,
) -> tuple[Tensor, Tensor | None]:
    """x (S, K), w (E, K, N), ends (E,) → y (R, N) in x's dtype, dots (R,) float32 (float64 for float64) or None.

    Args:
        num_rows: R, the length of every index that is given.
        bias: (E, N). gate: (R,). other: (S', N) and dot_bias (E, K), for the dots.
        zero_tail: write zeros for rows without an expert, where the indices must be a permutation; otherwise those rows
            of y are unspecified. Their dots are 0 in both cases.
    """
    acc = accumulation_dtype(x.dtype)
    y = x.new_zeros(num_rows, w.shape[2])
    dots = None if other is None else x.new_zeros(num_rows, dtype=acc)
    for e, p in _segments(ends):
        rows = x[_at(in_index, p, in_fan)].to(acc)
        product, at = rows @ w[e].to(acc), _at(pair, p, 1)
        if dots is not None and other is not None:
            dots[at] = (product * other[_at(other_index, p, other_fan)]).sum(1)
            if dot_bias is not None:
                dots[at] += rows @ dot_bias[e].to(acc)
        if bias is not None:
            product += bias[e]
        if gate is not None:
            product *= gate[at].to(acc).unsqueeze(1)
        y[_at(out_index, p, 1)] = product.to(y.dtype)
    return y, dots


def scattered_weights_ref(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_index: Tensor | None,
    a_fan: int,
    b_index: Tensor | None,
    b_fan: int,
    gate: Tensor | None,
    pair: Tensor | None,
    transposed: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor | None]:
    """a (S, M), b (S', N), ends (E,) → o (E, M, N) in a's dtype, sums (E, N) float32 (float64 for float64) or None.

    Args:
        transposed: lay o out as (E, N, M), so that a parameter behind a transposed view takes it as it is.
    """
    experts, acc = ends.shape[0], accumulation_dtype(a.dtype)
    m, n = a.shape[1], b.shape[1]
    o = a.new_empty(experts, n, m).transpose(1, 2) if transposed else a.new_empty(experts, m, n)
    sums = b.new_empty(experts, n, dtype=acc) if with_sums else None
    for e, p in _segments(ends):
        rows = b[_at(b_index, p, b_fan)].to(acc)
        if gate is not None:
            rows = rows * gate[_at(pair, p, 1)].to(acc).unsqueeze(1)
        o[e] = a[_at(a_index, p, a_fan)].to(acc).t() @ rows
        if sums is not None:
            sums[e] = rows.sum(0)
    return o, sums


@custom_op("megablocks::scattered_rows", mutates_args=())
def scattered_rows_op(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    num_rows: int,
    in_index: Tensor | None,
    in_fan: int,
    out_index: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    pair: Tensor | None,
    other: Tensor | None,
    other_index: Tensor | None,
    other_fan: int,
    dot_bias: Tensor | None,
    zero_tail: bool,
) -> tuple[Tensor, Tensor]:
    args = (
        x, w, ends, num_rows, in_index, in_fan, out_index, bias, gate, pair, other, other_index, other_fan, dot_bias,
        zero_tail,
    )  # fmt: skip
    if runs_triton(x):
        from megablocks.ops.scattered.scattered_triton import rows_launch

        y, dots = rows_launch(*args)
    else:
        with torch.autocast(x.device.type, enabled=False):  # or torch would narrow the reference's own products
            y, dots = scattered_rows_ref(*args)
    return y, x.new_empty(0) if dots is None else dots


@scattered_rows_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    num_rows: int,
    in_index: Tensor | None,
    in_fan: int,
    out_index: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    pair: Tensor | None,
    other: Tensor | None,
    other_index: Tensor | None,
    other_fan: int,
    dot_bias: Tensor | None,
    zero_tail: bool,
) -> tuple[Tensor, Tensor]:
    dots = x.new_empty(0) if other is None else x.new_empty(num_rows, dtype=accumulation_dtype(x.dtype))
    return x.new_empty(num_rows, w.shape[2]), dots


@custom_op("megablocks::scattered_weights", mutates_args=())
def scattered_weights_op(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_index: Tensor | None,
    a_fan: int,
    b_index: Tensor | None,
    b_fan: int,
    gate: Tensor | None,
    pair: Tensor | None,
    transposed: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    args = (a, b, ends, a_index, a_fan, b_index, b_fan, gate, pair, transposed, with_sums)
    if runs_triton(a):
        from megablocks.ops.scattered.scattered_triton import weights_launch

        o, sums = weights_launch(*args)
    else:
        with torch.autocast(a.device.type, enabled=False):
            o, sums = scattered_weights_ref(*args)
    return o, a.new_empty(0) if sums is None else sums


@scattered_weights_op.register_fake
def _(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_index: Tensor | None,
    a_fan: int,
    b_index: Tensor | None,
    b_fan: int,
    gate: Tensor | None,
    pair: Tensor | None,
    transposed: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    experts, m, n = ends.shape[0], a.shape[1], b.shape[1]
    o = a.new_empty(experts, n, m).transpose(1, 2) if transposed else a.new_empty(experts, m, n)
    return o, a.new_empty(experts, n, dtype=accumulation_dtype(a.dtype)) if with_sums else a.new_empty(0)


def scattered_rows(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    num_rows: int,
    *,
    in_index: Tensor | None = None,
    in_fan: int = 1,
    out_index: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    pair: Tensor | None = None,
    other: Tensor | None = None,
    other_index: Tensor | None = None,
    other_fan: int = 1,
    dot_bias: Tensor | None = None,
    zero_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and dots of `scattered_rows_ref`; an empty tensor in place of no dots."""
    return scattered_rows_op(
        x, w, ends, num_rows, in_index, in_fan, out_index, bias, gate, pair, other, other_index, other_fan, dot_bias,
        zero_tail,
    )  # fmt: skip


def scattered_weights(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    a_index: Tensor | None = None,
    a_fan: int = 1,
    b_index: Tensor | None = None,
    b_fan: int = 1,
    gate: Tensor | None = None,
    pair: Tensor | None = None,
    transposed: bool = False,
    with_sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """o and sums of `scattered_weights_ref`; an empty tensor in place of no sums."""
    return scattered_weights_op(a, b, ends, a_index, a_fan, b_index, b_fan, gate, pair, transposed, with_sums)
