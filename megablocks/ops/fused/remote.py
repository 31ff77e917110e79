"""The fused MLP of experts over several ranks: tokens go to their experts, and sums of the experts' rows come home.

    x (T, H) ─ to_experts ─▶ tokens (W·M, H) ─ mlp.py ─▶ rows (R, H) ─ to_home ─▶ y (T, H)

Legend: W ranks, T tokens of a rank, M >= T the most tokens of any rank, H hidden, K choices a token, R rows here.

Backward sends dY to the experts and computes the gradients of mlp.py; the sums for dX leave before dW1 and dV1 are
computed. A rank's share (W·M, H) of y and of dX is never written: to_home sums the rows while it pushes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.activation_table import Activation
from megablocks.ops.fused.mlp import ExpertParameters, MainGrads, Options, fused_mlp_op, gradients, save
from megablocks.ops.library import once_differentiable
from megablocks.ops.quant.quant import OFF
from megablocks.ops.routing.dispatch import Dispatch

if TYPE_CHECKING:  # it needs Triton, which a CPU may lack
    from megablocks.ops.exchange import Exchange


class Remote(NamedTuple):
    """Where tokens go, instead of a Dispatch: expert (T, K) int32 over all ranks, outside [0, E) for none."""

    exchange: Exchange
    expert: Tensor


class _RemoteMlp(torch.autograd.Function):
    # The first eight are those whose gradients `gradients` returns, in its order.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, b1: Tensor | None,
        c1: Tensor | None, b2: Tensor | None, remote: Remote, activation: Activation, options: Options,
        main_grads: MainGrads,
    ) -> Tensor:  # fmt: skip
        exchange, ids = remote
        tokens, local_ids, local_weight = exchange.to_experts(x.contiguous(), ids, weight.contiguous())
        assert local_weight is not None
        dispatch, local_weight = exchange.dispatch(local_ids), local_weight.flatten()
        parameters = ExpertParameters(w1, v1, w2, b1, c1, b2)
        inputs = (tokens, local_weight, parameters, dispatch, activation, options, *main_grads)
        rows, pre, gate = fused_mlp_op.implementation(*inputs)
        save(ctx, inputs, (rows, pre, gate))
        ctx.remote, ctx.local_ids = remote, local_ids
        return exchange.to_home(rows, local_ids, ids, None, dispatch, local_weight)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (exchange, ids), local_ids, dy = ctx.remote, ctx.local_ids, grads[0]
        if dy is None:
            return (None,) * 12

        def send(rows: Tensor, d_weight: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
            values = d_weight.view(local_ids.shape)
            dx, home = exchange.to_home(rows, local_ids, ids, values, dispatch)
            assert home is not None
            return dx, home

        dy = exchange.to_experts(dy.contiguous(), ids, None, local_ids)[0]
        dx, d_weight, of_parameters = gradients(ctx, dy, send)
        return dx, d_weight, *of_parameters, *(None,) * 4


def remote_mlp(
    x: Tensor, weight: Tensor, remote: Remote, parameters: ExpertParameters, activation: Activation, *,
    recompute: bool = False, input_bits: int = OFF, pre_bits: int = OFF,
    main_grads: MainGrads = MainGrads(),  # noqa: B008 (a NamedTuple is immutable)
) -> Tensor:  # fmt: skip
    """Apply its experts to each token, on any rank, and sum their outputs by weight.

    Args:
        x: (T, H) in the exchange's dtype.
        weight: (T, K) float32.
        remote: the exchange and the experts of T tokens.
        parameters: of this rank's experts, the matrices in x's dtype.
        The other arguments are those of `fused_mlp`.

    Returns:
        (T, H) in x's dtype; 0 for a token without an expert. Differentiable in x, weight and parameters.
    """
    w1, v1, w2, *biases = parameters
    biases = [None if b is None else b.to(x.dtype) for b in biases]
    options = Options(recompute, True, input_bits, pre_bits)
    return _RemoteMlp.apply(x, weight, w1, v1, w2, *biases, remote, activation, options, main_grads)
