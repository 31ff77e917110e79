"""Ways to compute the experts of one rank. All compute the same function; `megablocks.kinds.IMPLS` lists them.

    y[t] = Σ over t's pairs of weight · (act(w1_e · x[t] + b1_e) · w2_e + b2_e)          e = expert of the pair
    gated: act(w1_e · x[t] + b1_e) ⊙ (v1_e · x[t] + c1_e) instead of act(…)

Legend: T tokens, R pairs and their rows, sorted by expert, E local experts, C places, I expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megablocks.config import MoEConfig, refuse
from megablocks.kinds import QUANTIZED
from megablocks.ops.activation import activate, activation_ref
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.fused.mlp import ExpertParameters, MainGrads, fused_mlp
from megablocks.ops.grouped.bias import add_expert_bias
from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_gated
from megablocks.ops.grouped.grouped_mm import grouped_mm, torch_kernel_on
from megablocks.ops.hopper import MAX_EXPERTS, is_available, switched_on
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.quant.quant import OFF
from megablocks.ops.routing.dispatch import Dispatch, pad_dispatch
from megablocks.ops.scattered.dispatched import gathered_linear, linear_combine
from megablocks.ops.sparse.matrix import topology
from megablocks.ops.sparse.mlp import sparse_mlp

BLOCKS = (128, 64)
"""Block sizes of the block-sparse products, the fastest first."""


class ExpertCall(NamedTuple):
    """The input of an implementation. It returns (T, H): the weighted sum of each token's experts, zeros without one.

    parameters: of the local experts.
    x: (T, H).
    dispatch: of T tokens over the local experts.
    weight: (R,) float32, the factor on each pair's output; None for ones.
    config: activation, and what to save for backward.
    in_order: x contains the rows, already sorted by expert as in `sorted_dispatch`, and weight is None. Nothing is
        gathered or summed, and rows that no expert owns are unspecified.
    main_grads: tensors to which the gradients of w1, v1 and w2 can be added. Some implementations ignore them.
    """

    parameters: ExpertParameters
    x: Tensor
    dispatch: Dispatch
    weight: Tensor | None
    config: MoEConfig
    in_order: bool = False
    main_grads: MainGrads = MainGrads()


def choose_impl(
    *, on_hopper: bool, dtype: torch.dtype, saves_less: bool, num_experts: int, hidden_size: int, ffn_hidden_size: int
) -> str:
    """Return what mlp_impl "auto" means: "grouped" or "fused". It needs no GPU.

    The number of rows does not matter. So the choice needs no synchronization, and a new number of tokens recompiles
    nothing.

    Args:
        on_hopper: whether Hopper's kernels run on the layer's device, see `runs_on_hopper`. Other devices were not
            measured, and there "grouped" can fall back to torch's kernels.
        dtype: in which the experts compute.
        saves_less: whether anything is recomputed for backward ("fused" is then 6 % slower), or quantized (not
            measured).
        num_experts, hidden_size, ffn_hidden_size: E, H, I on this rank.
    """
    aligned = hidden_size % 8 == ffn_hidden_size % 8 == 0  # TMA reads rows of 16 bytes
    takes = on_hopper and dtype in (torch.bfloat16, torch.float16) and aligned and num_experts <= MAX_EXPERTS
    return "fused" if takes and not saves_less else "grouped"


def runs_on_hopper(device: torch.device) -> bool:
    """Return whether the kernels for Hopper are in use on `device`."""
    if device.type != "cuda" or not switched_on():
        return False
    return is_available(torch.cuda.current_device() if device.index is None else device.index)


def impl_for(
    config: MoEConfig, device: torch.device, dtype: torch.dtype, num_experts: int, ffn_hidden_size: int
) -> str:
    """Return config.mlp_impl, or the choice of "auto" for this number and width of experts on a rank.

    Raises:
        ConfigError: batch_invariant where torch's grouped GEMM would run, and nothing can replace it.
    """
    quantized = any(getattr(config, name) != OFF for name in QUANTIZED)
    choose = partial(
        choose_impl,
        on_hopper=runs_on_hopper(device),
        dtype=dtype,
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
    )
    hopper_takes = choose(saves_less=False) == "fused"
    if config.batch_invariant and device.type == "cuda" and torch_kernel_on(device, dtype) and not hopper_takes:
        if config.mlp_impl != "scatter" and (config.mlp_impl != "auto" or quantized):
            allowed = "on this GPU, for these sizes, needs mlp_impl='scatter' and nothing quantized: the others use"
            refuse("batch_invariant", True, f"{allowed} torch's products, which depend on the number of rows")
        return "scatter"
    if config.mlp_impl != "auto":
        return config.mlp_impl
    return choose(saves_less=config.recompute_activation or quantized)


def fused(call: ExpertCall) -> Tensor:
    """The whole MLP in one op (SonicMoE, arXiv 2512.14080)."""
    p, x, dispatch, weight, config, in_order, main_grads = call
    options = saved_by(config)
    return fused_mlp(x, weight, dispatch, p, config.act, in_order=in_order, main_grads=main_grads, **options)


def saved_by(config: MoEConfig) -> dict[str, Any]:
    """Return the keyword arguments that tell the fused and the sparse ops what to save for backward."""
    return {
        "recompute": config.recompute_activation,
        "input_bits": config.quantize_inputs_num_bits,
        "pre_bits": config.quantize_rematerialize_num_bits,
    }


def grouped(call: ExpertCall) -> Tensor:
    """One grouped GEMM per projection, over ragged rows; the up-projections gather the tokens themselves."""
    p, x, dispatch, weight, config, in_order, _ = call
    offsets = dispatch.expert_offsets
    w1, v1 = p.w1.transpose(1, 2), None if p.v1 is None else p.v1.transpose(1, 2)
    input_bits, pre_bits = config.quantize_inputs_num_bits, config.quantize_rematerialize_num_bits
    gate = None
    if in_order and input_bits == OFF:
        pre = grouped_mm(x, w1, offsets, p.b1)
        gate = None if v1 is None else grouped_mm(x, v1, offsets, p.c1)
    elif v1 is None:
        pre = gathered_mm(x, w1, dispatch, bias=p.b1, num_bits=input_bits)
    else:
        pre, gate = gathered_mm_gated(x, w1, v1, dispatch, bias=p.b1, gate_bias=p.c1, num_bits=input_bits)
    if config.recompute_activation or pre_bits != OFF:
        rows = activate_and_project(pre, gate, p.w2, offsets, config.act, bias=p.b2, num_bits=pre_bits)
    else:
        rows = grouped_mm(activate(pre, gate, config.act), p.w2, offsets, p.b2)
    return rows if in_order else combine(rows, weight, dispatch, num_bits=config.quantize_scatter_num_bits)


def scatter(call: ExpertCall) -> Tensor:
    """Tokens are gathered and weighted inside the products, never copied (ScatterMoE, arXiv 2403.08245)."""
    p, x, dispatch, weight, config, *_ = call
    act = config.act
    pre = gathered_linear(x, p.w1.transpose(1, 2), p.b1, dispatch)
    gate = None if p.v1 is None else gathered_linear(x, p.v1.transpose(1, 2), p.c1, dispatch)
    if config.recompute_activation:
        return linear_combine(pre, gate, p.w2, p.b2, weight, dispatch, act)
    return linear_combine(activate(pre, gate, act), None, p.w2, p.b2, weight, dispatch)


def sparse(call: ExpertCall) -> Tensor:
    """Pad each expert's rows to whole blocks, and use block-sparse products (MegaBlocks, arXiv 2211.15841).

    Padding rows are zero in the input and in the output's gradient, so they add nothing to any gradient.
    """
    p, x, dispatch, weight, config, *_ = call
    multiply, width = sparse_products(p, config), p.w1.shape[1]
    block_size = next(size for size in BLOCKS if width % size == 0)  # `check_width` refuses other widths
    max_rows = dispatch.scatter.shape[0]
    pattern, padded_offsets = topology(dispatch.expert_offsets, width, max_rows=max_rows, block_size=block_size)
    padded = pad_dispatch(dispatch, padded_offsets, pattern.shape[0])
    rows = multiply(gather(x, padded), pattern=pattern)
    if p.b2 is not None:
        rows = add_expert_bias(rows, p.b2, padded_offsets)
    return combine(rows, weight, padded, num_bits=config.quantize_scatter_num_bits)


def sparse_products(p: ExpertParameters, config: MoEConfig) -> Callable[..., Tensor]:
    """Return the block-sparse MLP without b2 as a function: rows (M, H), pattern= their blocks (M, E·I) → (M, H)."""
    return partial(
        sparse_mlp,
        w1=p.w1.flatten(0, 1).t(),
        w2=p.w2.flatten(0, 1),
        v1=None if p.v1 is None else p.v1.flatten(0, 1).t(),
        bias=None if p.b1 is None else p.b1.flatten(),
        gate_bias=None if p.c1 is None else p.c1.flatten(),
        activation=config.act,
        **saved_by(config),
    )


def reference(call: ExpertCall) -> Tensor:
    """A loop over the experts in float32 (float64 for float64). It reads the offsets on the host."""
    parameters, x, dispatch, weight, config, in_order, _ = call
    acc, rows = torch.promote_types(x.dtype, torch.float32), x if in_order else gather(x, dispatch)

    def down(pre: Tensor, gate: Tensor | None, w2: Tensor) -> Tensor:
        return activation_ref(pre, gate, config.act) @ w2

    outs = []
    bounds = dispatch.expert_offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        # An expert without rows is multiplied too: its gradients must be zeros, not None.
        w1, v1, w2, b1, c1, b2 = (None if p is None else p[expert].to(acc) for p in parameters)
        assert w1 is not None and w2 is not None
        own = rows[start:end].to(acc)
        pre = own @ w1.t() if b1 is None else own @ w1.t() + b1
        gate = None if v1 is None else own @ v1.t() if c1 is None else own @ v1.t() + c1
        if config.recompute_activation:
            out = checkpoint(down, pre, gate, w2, use_reentrant=False)
        else:
            out = down(pre, gate, w2)
        outs.append((out if b2 is None else out + b2).to(rows.dtype))
    outs.append(rows.new_zeros(rows.shape[0] - bounds[-1], rows.shape[1]))
    outputs = torch.cat(outs)
    return outputs if in_order else combine(outputs, weight, dispatch, num_bits=config.quantize_scatter_num_bits)


def sorted_dispatch(offsets: Tensor, num_rows: int) -> Dispatch:
    """Return the Dispatch of rows that are already sorted by expert, one token per row: offsets (E+1,) int32."""
    row = torch.arange(num_rows, dtype=torch.int32, device=offsets.device)
    first_slots = torch.arange(num_rows + 1, dtype=torch.int32, device=offsets.device)
    return Dispatch(offsets, torch.minimum(first_slots, offsets[-1]), row, row, row)


def batched(parameters: ExpertParameters, bins: Tensor, config: MoEConfig) -> Tensor:
    """bins (E, C, H) → (E, C, H) by one torch.bmm per projection, as in GShard, Switch, Tutel and megablocks 0.10."""
    p = parameters

    def project(w: Tensor, b: Tensor | None) -> Tensor:
        out = _BatchedLinear.apply(bins, w)
        return out if b is None else out + b.unsqueeze(1)

    pre = project(p.w1, p.b1)
    gate = None if p.v1 is None else project(p.v1, p.c1)

    def down(pre: Tensor, gate: Tensor | None, w2: Tensor) -> Tensor:
        return torch.bmm(activate(pre, gate, config.act), w2)

    if config.recompute_activation:
        out = checkpoint(down, pre, gate, p.w2, use_reentrant=False, preserve_rng_state=False)
    else:
        out = down(pre, gate, p.w2)
    return out if p.b2 is None else out + p.b2.unsqueeze(1)


class _BatchedLinear(torch.autograd.Function):
    """bmm(x, wᵀ) for x (E, C, H) and w (E, I, H), with w's gradient in w's own layout.

    torch.bmm of the view wᵀ leaves the gradient as (E, H, I). The copy into the parameter's layout took 1.8 ms of a
    step's 3.1 at E, I, H = 64, 4096, 1024 on an H200.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), dy = ctx.saved_tensors, grads[0]
        dx = torch.bmm(dy, w) if ctx.needs_input_grad[0] else None
        return dx, torch.bmm(dy.transpose(1, 2), x) if ctx.needs_input_grad[1] else None
