"""The weights of an experts module as right factors of products, with PEFT's LoRA factors kept separate.

    y[p] = x[p] · w[e] + (x[p] · a[e]) · b[e]        b includes LoRA's scaling

With PEFT's `target_parameters`, reading a parameter returns W + scaling · lhs · rhs. A product with that sum would
compute the full dW, although W is frozen, to get the gradients of the two factors. With separate factors only their
gradients are computed: R rows times the rank. Any other parametrization is read as torch computes it: correct, but not
faster.

Legend: R rows, E experts, K inner size, N outer size, r rank.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor

from megablocks.ops.grouped.bias import add_expert_bias
from megablocks.ops.grouped.gathered_mm import gathered_mm
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.grouped.low_rank_mm import low_rank_mm
from megablocks.ops.grouped.pair_mm import pair_mm
from megablocks.ops.library import under_autocast
from megablocks.ops.routing.dispatch import Dispatch


class Weight(NamedTuple):
    """One matrix per expert.

    w: (E, K, N), a view of the parameter.
    a, b: (E, K, r) and (E, r, N), or None.
    """

    w: Tensor
    a: Tensor | None = None
    b: Tensor | None = None

    def product(self, x: Tensor, dispatch: Dispatch, bias: Tensor | None, *, gathered: bool) -> Tensor:
        """x (T, K) if gathered, as in `gathered_mm`, otherwise (R, K), as in `grouped_mm`; bias (E, N) → (R, N)."""
        if self.a is not None and self.b is not None:
            y = low_rank_mm(x, self.w, self.a, self.b, dispatch, gathered=gathered)
            return y if bias is None else add_expert_bias(y, bias, dispatch.expert_offsets)
        if gathered:
            return gathered_mm(x, self.w, dispatch, bias=bias)
        return grouped_mm(x, self.w, dispatch.expert_offsets, bias)

    def each(self, rows: Tensor, ids: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """rows (T, K), ids (R,), bias (E, N), scale (R,) → (R, N), as `pair_mm`."""
        y = pair_mm(rows, self.w, ids, bias, scale)
        if self.a is None or self.b is None:
            return y
        return y + pair_mm(pair_mm(rows, self.a, ids), self.b, ids, None, scale)


def _lora_factors(module: Any, name: str) -> tuple[Tensor, Tensor, Tensor, float] | None:
    """Return (W, lhs, rhs, scaling) if the parameter has one LoRA adapter of PEFT, otherwise None."""
    chain = module._modules.get("parametrizations")  # getattr would build an error message at each call
    if chain is None:
        return None
    layer = sys.modules.get("peft.tuners.lora.layer")
    proxy = getattr(layer, "_LoraFactorsProxy", None)
    if proxy is None or name not in chain or len(chain[name]) != 1 or type(chain[name][0]) is not proxy:
        return None
    lora = chain[name][0]
    return chain[name].original, lora.lhs, lora.rhs, lora.scaling


def check_weight(module: Any, name: str, w: Tensor) -> None:
    """Raise a ValueError that names the parameter w, of any shape, if its dtype is quantized."""
    if not w.is_floating_point() or w.dtype.itemsize < 2:
        raise ValueError(
            f"{type(module).__name__}.{name} is {w.dtype}: experts_implementation='megablocks' needs bfloat16, "
            "float16, float32 or float64; load the model without quantization"
        )


def read_weight(module: Any, name: str, autocast: bool = True) -> Weight:
    """Return the parameter `name` of an experts module, in autocast's dtype if autocast is on.

    Call it once per forward: torch can compute a parametrized weight again at each read.

    autocast: False if the caller knows that autocast is off.

    Raises:
        ValueError: weights in a quantized dtype.
    """
    factors = _lora_factors(module, name)
    w = getattr(module, name) if factors is None else factors[0]
    check_weight(module, name, w)
    if factors is None:
        if autocast:
            (w,) = under_autocast(w)
        return Weight(w if module.is_transposed else w.mT)
    w, lhs, rhs = under_autocast(*factors[:3])
    if module.is_transposed:
        return Weight(w, lhs, rhs * factors[3])
    return Weight(w.transpose(1, 2), rhs.transpose(1, 2), lhs.transpose(1, 2) * factors[3])
