"""Mixture of attention: each token attends with the query heads of the K experts that its router chose.

    q[t, j] = Wq_e · x[t]                     e = the j-th expert of token t: `num_heads` heads of size D
    k[t], v[t] = Wk · x[t], Wv · x[t]         shared by all experts: `num_kv_heads` heads
    o[t, j] = softmax(rope(q[t, j]) · rope(k)ᵀ / √D) · v
    y[t] = Σ_j weight[t, j] · Wo_e · o[t, j]

All heads attend in the same way, whichever expert they belong to. Both expert projections read and return pairs in
token order (`parallel_linear`, scattered to scattered), so nothing is sorted or copied around the attention.
Sources: ScatterMoE (arXiv 2403.08245); grouped queries (arXiv 2305.13245); rotary embedding (arXiv 2104.09864).

Legend: B sequences of S tokens, T = B·S, H hidden, E experts, K top-k, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megablocks.config import MoEConfig, check_config, check_integers, refuse
from megablocks.moe.layer import AuxOutput
from megablocks.moe.parallel_experts import ParallelExperts
from megablocks.moe.router import TopKRouter
from megablocks.ops.rope import rope
from megablocks.ops.scattered.parallel_linear import flatten_sort_count


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary embedding over positions 0 to S-1: pairs (d, d + D/2) turn by position · base^(-2d/D), in float32.

    x (B, S, …, D) of at least four dimensions, D even → same shape and dtype.
    """
    size, length = x.shape[-1], x.shape[1]
    frequency = base ** (torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / -size)
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), frequency).repeat(1, 2)
    return rope(x.flatten(2, -2).transpose(0, 1), angles).transpose(0, 1).reshape(x.shape)


class MixtureOfAttention(nn.Module):
    """Causal self-attention whose queries and outputs are projected by experts.

    Args:
        config: hidden_size, num_experts, top_k, the router, its losses and init stds are used; ffn_hidden_size is the
            width of an expert's queries, num_heads · D; mlp_bias adds biases to all four projections. activation and
            mlp_impl are ignored; other options of MLP experts are refused.
        num_heads: query heads of an expert; a token has K · num_heads.
        num_kv_heads: heads of the shared keys and values, a divisor of num_heads; None for num_heads.
        rope_base: base of the rotary embedding, None for no position embedding.
        attention_dropout: probability in training.
        causal: whether a token attends only to itself and to earlier tokens.
        loss_group, init_method: as for the routers.
        device, dtype: of the parameters; torch's defaults if None.

    Raises:
        ConfigError: a router that gives tokens different numbers of experts, a capacity, an option of MLP experts, or
            sizes that do not fit.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        rope_base: float | None = 10000.0,
        attention_dropout: float = 0.0,
        causal: bool = True,
        loss_group: dist.ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config(config)
        self.config, self.num_heads = config, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.rope_base, self.attention_dropout, self.causal = rope_base, attention_dropout, causal
        _check(self)
        self.head_size = config.ffn_hidden_size // num_heads
        hidden, width, bias = config.hidden_size, config.ffn_hidden_size, config.mlp_bias
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = TopKRouter(config, loss_group=loss_group, init_method=init_method, **placed)
        self.query = ParallelExperts(config.num_experts, hidden, width, bias, **placed)
        self.key_value = nn.Linear(hidden, 2 * self.num_kv_heads * self.head_size, bias=bias, **placed)
        self.output = ParallelExperts(config.num_experts, width, hidden, bias, **placed)
        self._draw_projections()

    def reset_parameters(self) -> None:
        """Initialize every parameter again, as after `to_empty` of a layer on "meta"."""
        self.router.reset_parameters()
        self._draw_projections()

    @torch.no_grad()
    def _draw_projections(self) -> None:
        """Fill weights from normals with the config's stds, and biases with 0. The router initializes itself."""
        std, output_std = self.config.init_std, self.config.output_init_std
        output_std = std if output_std is None else output_std
        for projection in (self.query, self.key_value, self.output):
            nn.init.normal_(projection.weight, std=output_std if projection is self.output else std)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H) → (B, S, H), without the auxiliary losses of `forward_with_aux`."""
        return self.forward_with_aux(x)[0]

    def forward_with_aux(self, x: Tensor) -> tuple[Tensor, AuxOutput]:
        """x (B, S, H) → y (B, S, H), and the router's losses, to be added to the training loss, and metrics.

        Raises:
            ValueError: x of another shape, or not floating.
        """
        if x.dim() != 3 or x.shape[2] != self.config.hidden_size:
            raise ValueError(f"x is {tuple(x.shape)}: must be (B, S, {self.config.hidden_size})")
        if not x.is_floating_point():
            raise ValueError(f"x: has dtype {x.dtype}, must be the layer's {self.key_value.weight.dtype}")
        batch, length, top_k = x.shape[0], x.shape[1], self.config.top_k
        tokens = x.reshape(-1, x.shape[2])
        routing = self.router(tokens)
        order = flatten_sort_count(routing.expert, self.config.num_experts)
        query = self.query(tokens, top_k, *order).view(batch, length, top_k, self.num_heads, self.head_size)
        key, value = self.key_value(x).view(batch, length, 2, self.num_kv_heads, self.head_size).unbind(2)
        attended = self._attend(query, key, value).reshape(-1, self.config.ffn_hidden_size)
        y = self.output(attended, 1, *order, gates=routing.weight.view(-1, top_k))
        return y.view(x.shape), AuxOutput(routing.losses, routing.metrics)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (B, S, K, heads, D), key and value (B, S, kv heads, D) → (B, S, K, heads, D)."""
        batch, length, top_k, heads, size = query.shape
        if self.rope_base is not None:
            query, key = rotate(query, self.rope_base), rotate(key, self.rope_base)
        groups = heads // self.num_kv_heads
        # a key head serves neighboring query heads: those of one kv head side by side, over all K choices
        query = query.view(batch, length, top_k, self.num_kv_heads, groups, size).permute(0, 3, 2, 4, 1, 5)
        out = F.scaled_dot_product_attention(
            query.reshape(batch, top_k * heads, length, size),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=top_k * groups > 1,
        )
        out = out.view(batch, self.num_kv_heads, top_k, groups, length, size).permute(0, 4, 2, 1, 3, 5)
        return out.reshape(batch, length, top_k, heads, size)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.config.num_experts}, top_k={self.config.top_k}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_size={self.head_size}, causal={self.causal}"
        )


# Required values. Others ask for a computation, or for a saving of memory, that this layer does not have.
_NEEDED = {
    "router_type": "topk", "token_rounding": None, "capacity_factor": None, "output_bias": False,
    "shared_expert_hidden_size": None, "recompute_activation": False, "quantize_inputs_num_bits": -1,
    "quantize_rematerialize_num_bits": -1, "quantize_scatter_num_bits": -1, "gradient_accumulation_fusion": False,
    "batch_invariant": False,
}  # fmt: skip


def _check(layer: MixtureOfAttention) -> None:
    for name, needed in _NEEDED.items():
        if getattr(layer.config, name) != needed:
            refuse(name, getattr(layer.config, name), f"must be {needed!r} for a mixture of attention")
    check_integers(layer, "num_heads", "num_kv_heads")
    width, heads = layer.config.ffn_hidden_size, layer.num_heads
    rope_base, dropout = layer.rope_base, layer.attention_dropout
    if width % heads:
        refuse("num_heads", heads, f"must divide ffn_hidden_size={width}, the width of an expert's queries")
    if heads % layer.num_kv_heads:
        refuse("num_kv_heads", layer.num_kv_heads, f"must divide num_heads={heads}")
    if rope_base is not None and not (isinstance(rope_base, (int, float)) and math.isfinite(rope_base)):
        refuse("rope_base", rope_base, "must be a finite number > 0, or None")
    if rope_base is not None and (rope_base <= 0 or width // heads % 2):
        refuse("rope_base", rope_base, f"must be > 0 and the head size {width // heads} even, or None")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        refuse("attention_dropout", dropout, "must be in [0, 1)")
    if not isinstance(layer.causal, bool):
        refuse("causal", layer.causal, "must be True or False")
