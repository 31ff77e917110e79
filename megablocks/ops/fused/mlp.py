"""The whole MLP of a layer's experts as one differentiable op that saves little for backward.

    pre[p] = x[gather[p]] · w1[e]ᵀ + b1[e]      gate[p] = x[gather[p]] · v1[e]ᵀ + c1[e] where gated
    act[p] = f(pre[p]), or f(pre[p]) ⊙ gate[p]  of the rounded pre and gate, as backward sees them
    y[t] = Σ over the rows p of token t of s[p] · (act[p] · w2[e] + b2[e])

Legend: T tokens, H hidden, R rows and pairs, V <= R valid rows, E experts, I expert width, s[p] = weight[pair[p]].
Rows p >= V are never read, and those rows of pre, gate, act and their gradients are unspecified.

Saved for backward are x, pre, gate, weight and the indices: 2·T·H + 4·R·I bytes in bfloat16 if gated, otherwise
2·T·H + 2·R·I. With `recompute` only x, weight and the indices are saved. x, pre and gate can be quantized
(`ops.quant`). Neither act nor any tensor of size R·H outlives a call. Backward, from dY:

    d_act[p] = dY[gather[p]] · w2[e]ᵀ                 without s, so that d_weight needs only act
    d_pre[p] = s · d_act ⊙ ∂act/∂pre                  d_gate[p] = s · d_act ⊙ f(pre)
    d_weight[pair[p]] = ⟨d_act, act⟩ + ⟨dY, b2[e]⟩    0 for an unused pair
    dX[t] = Σ over the rows p of token t of d_pre · w1[e] + d_gate · v1[e]
    dW1 = d_preᵀ · x[gather],  dV1 = d_gateᵀ · x[gather],  dW2 = (s · act)ᵀ · dY[gather],  and the biases' sums

The matrices' gradients can instead be added to float32 buffers of the caller (`MainGrads`).

Forward is `fused_up_op` for pre, gate and act, the down product and `combine`; on a CPU each op is its reference. On
Hopper one kernel computes pre, gate and act (up_hopper.py). Backward begins with one kernel for d_pre, d_gate, s · act
and d_weight, which never writes d_act, if that is faster (gradient_hopper.py). On other GPUs pre and gate are products
and the activation is a pass; backward begins with a product and a pass over its rows (gradient_triton.py).
Source: SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_op, activation_ref, check_activation
from megablocks.ops.activation_table import Activation
from megablocks.ops.grouped.bias import expert_sum_op, output_bias_dot_op
from megablocks.ops.grouped.gathered_mm import (
    gathered_mm_dw_add_op,
    gathered_mm_dw_halves_op,
    gathered_mm_dw_op,
    gathered_mm_op,
    grouped_mm_sum_op,
)
from megablocks.ops.grouped.grouped_mm import grouped_mm_op, grouped_mm_ref, is_transposed, weight_gradient
from megablocks.ops.hopper import runs_hopper
from megablocks.ops.library import custom_op, once_differentiable, runs_triton, under_autocast
from megablocks.ops.permute.rows import by_pair, combine_op, gather_op
from megablocks.ops.quant.quant import OFF, check_bits, pack, unpack
from megablocks.ops.routing.dispatch import Dispatch


class ExpertParameters(NamedTuple):
    """The matrices and biases of E experts.

    w1, v1, w2: (E, I, H); v1 is None unless the activation is gated.
    b1, c1, b2: (E, I), (E, I) and (E, H), or None each; c1 only with v1.

    `fused_mlp` also accepts both up-projections of a gated MLP in one tensor: w1 (E, 2·I, H) with v1's matrices in its
    lower half, v1 None, and b1 (E, 2·I) or None.
    """

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    b1: Tensor | None = None
    c1: Tensor | None = None
    b2: Tensor | None = None


def _are_joined(parameters: ExpertParameters, activation: Activation) -> bool:
    """Whether w1 also holds v1."""
    w1, v1, w2, _, c1, _ = parameters
    both = w1.dim() == 3 and w2.dim() == 3 and w1.shape[1] == 2 * w2.shape[1]
    return activation.gated and v1 is None and c1 is None and both


def _apart(parameters: ExpertParameters, activation: Activation) -> ExpertParameters:
    """The parameters with w1 and v1, and b1 and c1, as separate tensors."""
    if not _are_joined(parameters, activation):
        return parameters
    w1, _, w2, b1, _, b2 = parameters
    (w1, v1), (b1, c1) = w1.chunk(2, dim=1), (None, None) if b1 is None else b1.chunk(2, dim=1)
    return ExpertParameters(w1, v1, w2, b1, c1, b2)


class MainGrads(NamedTuple):
    """For each matrix the tensor to which backward adds its gradient, or None if autograd gets the gradient.

    Each tensor is contiguous and float32 (float64 for float64), and has the shape of its matrix.
    """

    w1: Tensor | None = None
    v1: Tensor | None = None
    w2: Tensor | None = None


class Options(NamedTuple):
    """The options of `fused_mlp`."""

    recompute: bool = False
    in_order: bool = False
    input_bits: int = OFF
    pre_bits: int = OFF


def fused_up_ref(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, dispatch: Dispatch,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """x (T, H), w1, v1 (E, I, H), b1, c1 (E, I) → pre, gate (None unless gated) and act (R, I)."""
    rows, offsets = x.index_select(0, dispatch.gather), dispatch.expert_offsets
    pre = grouped_mm_ref(rows, w1.transpose(1, 2), offsets, b1)
    gate = None if v1 is None else grouped_mm_ref(rows, v1.transpose(1, 2), offsets, c1)
    return pre, gate, activation_ref(pre, gate, activation)


def mlp_gradient_ref(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, dispatch: Dispatch, activation: Activation
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """d_act, pre, gate (R, I), weight (R,) → d_pre, d_gate, s · act (R, I) and d_weight (R,) without b2's part."""
    acc, dtype, pair = torch.promote_types(d_act.dtype, torch.float32), d_act.dtype, dispatch.pair
    d_act, pre, gate = d_act.to(acc), pre.to(acc), None if gate is None else gate.to(acc)
    scale = weight.to(acc).index_select(0, pair).unsqueeze(1)
    act = activation_ref(pre, gate, activation)
    d_pre, d_gate = activation_backward_ref(d_act * scale, pre, gate, activation)
    d_weight = by_pair((d_act * act).sum(1).to(weight.dtype), dispatch)
    return d_pre.to(dtype), None if d_gate is None else d_gate.to(dtype), (act * scale).to(dtype), d_weight


def up_kernels(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, dispatch: Dispatch
) -> ModuleType | None:
    """The module of the kernel for these tensors, None if other ops compute pre, gate and act."""
    if dispatch.num_rows == 0 or not runs_hopper(x) or (v1 is not None and (b1 is None) != (c1 is None)):
        return None  # the kernel adds both biases or none
    from megablocks.ops.fused import up_hopper

    takes = (up_hopper.supports(x, w, dispatch.expert_offsets, dispatch.num_rows) for w in (w1, v1) if w is not None)
    return up_hopper if all(takes) else None


def _fake_fused_up(a: Any) -> tuple[Tensor | None, ...]:
    pre, gate, act = (a.x.new_empty(a.dispatch.num_rows, a.w1.shape[1]) for _ in range(3))
    return pre, None if a.v1 is None else gate, act


@custom_op("megablocks::fused_up", fake=_fake_fused_up)
def fused_up_op(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, dispatch: Dispatch,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """pre, gate (empty unless gated) and act. It has no gradient of its own."""
    if not x.is_cuda:
        return fused_up_ref(x, w1, v1, b1, c1, dispatch, activation)
    if kernels := up_kernels(x, w1, v1, b1, c1, dispatch):
        b1, c1 = (None if t is None else t.contiguous() for t in (b1, c1))
        return kernels.up(x, w1, v1, b1, c1, dispatch, activation)
    w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
    pre, gate = gathered_mm_op(x, w1, v1, b1, c1, dispatch)
    return pre, gate, activation_op(pre, None if v1 is None else gate, activation)


def _fake_down_gradient(a: Any) -> tuple[Tensor | None, ...]:
    d_pre, d_gate, scaled = (torch.empty_like(a.pre) for _ in range(3))
    return d_pre, None if a.gate is None else d_gate, scaled, torch.empty_like(a.weight)


@custom_op("megablocks::down_gradient", fake=_fake_down_gradient)
def down_gradient_op(
    dy: Tensor, w2: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, dispatch: Dispatch, activation: Activation
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dy (T, H), w2 (E, I, H) → d_pre, d_gate (empty without gate), s · act and d_weight, as `mlp_gradient_ref`."""
    arguments = pre, gate, weight, dispatch, activation
    if runs_hopper(dy):
        from megablocks.ops.fused import gradient_hopper as hopper

        if hopper.pays(w2.shape[2]) and hopper.supports(dy, w2, pre, gate, weight, dispatch.expert_offsets):
            return hopper.down_gradient(dy, w2, *arguments)
    d_act, _ = gathered_mm_op(dy, w2.transpose(1, 2), None, None, None, dispatch)
    if runs_triton(dy):
        from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

        return mlp_gradient_launch(d_act, *arguments)
    return mlp_gradient_ref(d_act, *arguments)


def _fake_fused_mlp(a: Any) -> tuple[Tensor | None, ...]:
    y, shape = a.x.new_empty(a.x.shape), (a.dispatch.num_rows, a.parameters.w2.shape[1])
    if a.options.recompute:
        return y, None, None
    return y, a.x.new_empty(shape), a.x.new_empty(shape) if a.activation.gated else None


@custom_op("megablocks::fused_mlp", fake=_fake_fused_mlp)
def fused_mlp_op(
    x: Tensor, weight: Tensor, parameters: ExpertParameters, dispatch: Dispatch, activation: Activation,
    options: Options, main_w1: Tensor | None = None, main_v1: Tensor | None = None, main_w2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """y (T, H), and pre and gate (R, I) for backward: both empty with recompute, gate empty unless gated."""
    w1, v1, w2, b1, c1, b2 = _apart(parameters, activation)
    pre, gate, act = fused_up_op(x, w1, v1, b1, c1, dispatch, activation)
    rows = grouped_mm_op(act, w2, dispatch.expert_offsets, b2)
    del act
    y = rows if options.in_order else combine_op(rows, weight, dispatch)
    return (y, None, None) if options.recompute else (y, pre, gate)


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the arguments and results of fused_mlp_op that `gradients` needs."""
    # The main grads are not saved: other micro-batches may add to them before this one's backward.
    x, weight, parameters, dispatch, ctx.activation, ctx.options, *ctx.main_grads = inputs
    _, pre, gate = output
    ctx.mark_non_differentiable(pre, gate)
    ctx.set_materialize_grads(False)
    ctx.packed_x, *kept_x = pack(x, ctx.options.input_bits)
    ctx.packed_pre, *kept_pre = pack(pre, ctx.options.pre_bits)
    ctx.packed_gate, *kept_gate = pack(gate, ctx.options.pre_bits)
    ctx.save_for_backward(*kept_x, *kept_pre, *kept_gate, weight, *parameters, *dispatch[:5])


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return (None,) * 9 if dy is None else (*gradients(ctx, dy), *(None,) * 6)


def gradients(
    ctx: Any, dy: Tensor, send: Callable[[Tensor, Tensor, Dispatch], tuple[Tensor, Tensor]] | None = None
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """The gradients of x, weight and each of the parameters, from dY (T, H).

    send: called before dW1 is computed, with the rows (R, H) whose sums are dX, with d_weight (R,) and the dispatch.
        Returns dx and d_weight. With None the rows are summed here.
    """
    x, x_scales, pre, pre_scales, gate, gate_scales, weight, w1, v1, w2, b1, c1, b2, *indices = ctx.saved_tensors
    dispatch, activation = Dispatch(*indices), ctx.activation
    offsets = dispatch.expert_offsets
    main_w1, main_v1, main_w2 = ctx.main_grads
    need_x, need_weight, need_w1, need_v1, need_w2, need_b1, need_c1, need_b2 = ctx.needs_input_grad[:8]
    dx = d_weight = dw1 = dv1 = dw2 = db1 = dc1 = db2 = None
    x = unpack(ctx.packed_x, x, x_scales)
    given = ExpertParameters(w1, v1, w2, b1, c1, b2)
    joined = _are_joined(given, activation)
    apart: Any = _apart(given, activation)
    w1, v1, w2, b1, c1, b2 = apart
    dy = dy.contiguous()  # no kernel reads the strides of an expanded gradient
    if ctx.options.recompute:
        pre, gate, _ = fused_up_op(x, w1, v1, b1, c1, dispatch, activation)
    else:
        pre, gate = unpack(ctx.packed_pre, pre, pre_scales), unpack(ctx.packed_gate, gate, gate_scales)
    if any(ctx.needs_input_grad[:7]):
        d_pre, d_gate, scaled, d_weight = down_gradient_op(
            dy, w2, pre, None if v1 is None else gate, weight, dispatch, activation
        )
        del pre, gate
        if need_w2 and main_w2 is None and is_transposed(w2):
            # in w2's own layout, which needs dY's rows gathered: autograd would copy and transpose the other layout
            dw2 = weight_gradient(scaled, gather_op(dy, dispatch), offsets, transposed=True)
        elif need_w2:
            dw2 = _matrix_gradient(main_w2, scaled, dy, dispatch)
        del scaled
        if need_weight and b2 is not None:
            d_weight = d_weight + output_bias_dot_op(dy, b2, dispatch).to(weight.dtype)
        if need_x or (send and need_weight):
            if v1 is None:
                rows = grouped_mm_op(d_pre, w1, offsets)
            else:
                rows = grouped_mm_sum_op(d_pre, w1, d_gate, v1, offsets)
            if send:
                dx, d_weight = send(rows, d_weight, dispatch)
            else:
                dx = rows if ctx.options.in_order else combine_op(rows, None, dispatch)
            del rows
        if joined:
            dw1 = gathered_mm_dw_halves_op(d_pre, d_gate, x, dispatch) if need_w1 else None
        else:
            dw1 = _matrix_gradient(main_w1, d_pre, x, dispatch) if need_w1 else None
            dv1 = _matrix_gradient(main_v1, d_gate, x, dispatch) if need_v1 else None
        db1 = expert_sum_op(d_pre, offsets) if need_b1 else None
        dc1 = expert_sum_op(d_gate, offsets) if need_c1 or (joined and need_b1) else None
        if db1 is not None and dc1 is not None and joined:
            db1, dc1 = torch.cat([db1, dc1], dim=1), None
    if need_b2:
        db2 = expert_sum_op(dy, offsets, weight, dispatch.gather, dispatch.pair)
    return dx if need_x else None, (d_weight if need_weight else None), (dw1, dv1, dw2, db1, dc1, db2)


def _matrix_gradient(main_grad: Tensor | None, left: Tensor, right: Tensor | None, dispatch: Dispatch) -> Tensor | None:
    """leftᵀ · right[gather] of each expert (E, I, H), or None after adding it to main_grad."""
    if main_grad is None:
        return gathered_mm_dw_op(left, right, dispatch)
    gathered_mm_dw_add_op(main_grad, left, right, dispatch)
    return None


fused_mlp_op.register_autograd(_backward, setup_context=save)


def fused_mlp(
    x: Tensor, weight: Tensor | None, dispatch: Dispatch, parameters: ExpertParameters, activation: Activation, *,
    recompute: bool = False, in_order: bool = False, input_bits: int = OFF, pre_bits: int = OFF,
    main_grads: MainGrads = MainGrads(),  # noqa: B008 (a NamedTuple is immutable)
) -> Tensor:  # fmt: skip
    """Apply its experts to each token, and sum their outputs by weight.

    Args:
        x: (T, H) floating.
        weight: (R,) floating (float32 in a layer), one per pair in the order of the Routing; None for ones.
        dispatch: of T tokens and R pairs.
        parameters: the matrices in x's dtype, the biases in any. If w1 also holds v1, its gradient is one tensor too.
        activation: as in `activate`.
        recompute: save only x and weight, and compute the up-projection again in backward.
        in_order: row p of the dispatch is token p, and weight is None. Nothing is summed; rows of the result and of
            x's gradient after the last expert's are unspecified.
        input_bits, pre_bits: 4 or 8 save x, or pre and gate, quantized (`ops.quant`); -1 saves them as they are.
        main_grads: tensors to which backward adds the matrices' gradients, which autograd then does not get.

    Returns:
        (T, H) in x's dtype; 0 for a token without a valid pair. Differentiable in x, weight and parameters.

    Raises:
        ValueError: shapes or dtypes that do not fit, a gate that the activation does not use, a missing gate, in_order
            with a weight, or main_grads that cannot hold these gradients.
    """
    w1, v1, w2, b1, c1, b2 = parameters
    x, w1, v1, w2 = under_autocast(x, w1, v1, w2)
    num_tokens, num_pairs = dispatch.token_offsets.shape[0] - 1, dispatch.scatter.shape[0]
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    parameters = ExpertParameters(w1, v1, w2, b1, c1, b2)
    apart = _apart(parameters, activation)
    _check(x, weight, apart, dispatch, activation)
    if _are_joined(parameters, activation) and (main_grads.w1 is not None or main_grads.v1 is not None):
        raise ValueError(f"main_grads has a tensor for w1 or v1, but w1 {tuple(w1.shape)} holds both: give them apart")
    _check_main_grads(apart, main_grads)
    if in_order and (weight is not None or num_tokens != num_pairs):
        raise ValueError(f"in_order=True: needs weight=None, and as many tokens ({num_tokens}) as pairs ({num_pairs})")
    if weight is None:
        weight = torch.ones(num_pairs, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    biases = [None if b is None else b.to(x.dtype) for b in (b1, c1, b2)]
    for what, bits in (("input_bits", input_bits), ("pre_bits", pre_bits)):
        if bits != OFF:
            check_bits(bits, "4, 8, or -1 for off", what)
    options = Options(recompute, in_order, input_bits, pre_bits)
    return fused_mlp_op(x, weight, ExpertParameters(w1, v1, w2, *biases), dispatch, activation, options, *main_grads)[0]


def _check(
    x: Tensor, weight: Tensor | None, parameters: ExpertParameters, dispatch: Dispatch, activation: Activation
) -> None:
    w1, v1, w2, b1, c1, b2 = parameters
    experts, hidden = dispatch.expert_offsets.shape[0] - 1, x.shape[1]
    if w1.dim() != 3 or w1.shape[0] != experts or w1.shape[2] != hidden:
        raise ValueError(f"w1 is {tuple(w1.shape)}: must be (E, I, H) with E={experts} and H={hidden}")
    check_activation(w1, v1, activation, "v1")
    if c1 is not None and v1 is None:
        raise ValueError(f"c1 is given: activation={activation.name!r} has no gate to add it to")
    inner = w1.shape[1]
    for what, t, shape in (
        ("w2", w2, w1.shape), ("v1", v1, w1.shape), ("b1", b1, (experts, inner)), ("c1", c1, (experts, inner)),
        ("b2", b2, (experts, hidden)), ("weight", weight, (dispatch.scatter.shape[0],)),
    ):  # fmt: skip
        if t is not None and t.shape != shape:
            raise ValueError(f"{what} is {tuple(t.shape)}: must be {tuple(shape)}")
    for what, t in (("w1", w1), ("v1", v1), ("w2", w2)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{what} is {t.dtype}, must be {x.dtype} as x is: cast one, or run under autocast")


def _check_main_grads(parameters: ExpertParameters, main_grads: MainGrads) -> None:
    p, m = parameters, main_grads  # by name: Dynamo of torch 2.8 traces neither _fields nor zips of other lengths
    for what, matrix, main in (("w1", p.w1, m.w1), ("v1", p.v1, m.v1), ("w2", p.w2, m.w2)):
        if main is None:
            continue
        if matrix is None:
            raise ValueError(f"main_grads has a tensor for {what}, but {what} is None: must be None too")
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        if main.shape != matrix.shape or main.dtype != dtype or not main.is_contiguous():
            strides = "contiguous" if main.is_contiguous() else f"of strides {main.stride()}"
            given = f"{tuple(main.shape)} {main.dtype}, {strides}"
            raise ValueError(f"main_grads of {what} is {given}: must be {tuple(matrix.shape)} {dtype}, contiguous")
