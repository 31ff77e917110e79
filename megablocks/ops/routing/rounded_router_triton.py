"""The launches behind `rounded_router_op`, forward: the router's first two kernels, then those of rounding.

Legend: T tokens, E experts, R pairs. Six launches and one scan of T counts, one more for "stochastic_score". Of T·E
elements: the logits are read, each pair's weight and key written (8 bytes), the keys searched, flags written (1 byte)
and read twice. Backward is the router's one launch, which reads logits, flags and the R gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.routing.rounding_triton import flags_launch, place_launch, round_launch
from megablocks.ops.routing.router import RouterOptions
from megablocks.ops.routing.router_triton import score_launch


def rounded_route_launch(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rule: str, tile: int, num_pairs: int, options: RouterOptions,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results as of `rounded_router_op`, for at least one token."""
    num_tokens, num_experts = logits.shape
    values = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=logits.device)
    keys = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=logits.device)
    balance, z, sums, load, stats = score_launch(logits, bias, padding_mask, None, (values, keys), options)
    rounded, dropped = round_launch(keys, load, stats, draw, rule, tile)
    flags, ends = flags_launch(keys, rounded)
    token, expert, weight = place_launch(flags, ends, num_pairs, values)
    return weight, balance, z, sums, expert, token, load, stats, rounded, dropped, flags, ends
