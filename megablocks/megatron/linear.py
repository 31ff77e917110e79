"""Megatron's projection to queries, keys and values, with its bias added inside the product.

Megatron's linear layer adds a bias in a pass of its own, which reads and writes the whole output. torch hands a bias to
cuBLAS, which adds it before it stores the product. All other linear layers of a GPT return their bias, and the
activation or the residual adds it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

_PLAIN = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "grad_output_buffer": None,
    "gtp_remat_size": 1,
}
"""Options of Megatron's linear function, with the values for which it computes only x · Wᵀ + bias."""


class BiasInProduct(ColumnParallelLinear):
    """Megatron's ColumnParallelLinear. It adds the bias inside the product if its ranks exchange nothing.

    Otherwise, for example with tensor parallelism, Megatron's own function runs.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        plain = all(options[name] == value for name, value in _PLAIN.items())
        if bias is not None and plain and weight.requires_grad:  # with a frozen weight Megatron trains no bias
            return F.linear(input, weight, bias)
        return super()._forward_impl(input=input, weight=weight, bias=bias, **options)
