"""Core attention through torch's scaled_dot_product_attention, for Megatron without Transformer Engine.

Megatron's own fallback builds the (batch·heads, S, S) scores in memory. Here a causal layer without a mask runs the
fused causal kernel. A mask is applied as it is: with `--reset-attention-mask` it is more than causal, and to find that
out would need a host synchronization. If attention is only causal, pass `--no-create-attention-mask-in-dataloader`; the
driver does this automatically.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.config import refuse

_SUPPORTED = {"context_parallel_size": 1, "window_size": None, "softmax_type": "vanilla"}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class SDPAttention(MegatronModule):
    """Attention over projected heads, with the arguments of Megatron's DotProductAttention.

    Raises ConfigError for context parallelism, sliding windows or softmax sinks, where `supports(config)` is False.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        for name, allowed in _SUPPORTED.items():
            if (value := getattr(config, name)) != allowed:
                refuse(name, value, f"must be {allowed!r}, or use --megablocks-attention megatron")
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling has no effect here. Against overflow in fp16 it divides the scores by the layer
        # number and multiplies them by it again; the fused kernel keeps scores in float32.
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: (S, B, N, D), N heads on this rank. key, value: (S_k, B, G, D), N divisible by G groups.
            attention_mask: bool, broadcastable to (B, N, S, S_k), True = must not attend; None = by the mask type.

        Returns:
            (S, B, N·D).
        """
        if packed_seq_params is not None or attention_bias is not None:
            name = "packed_seq_params" if packed_seq_params is not None else "attention_bias"
            raise ValueError(f"{name} is given: attention without Transformer Engine supports None only")
        mask_type = attn_mask_type or self.attn_mask_type
        seq, seq_k = query.shape[0], key.shape[0]
        causal = mask_type in _CAUSAL and seq > 1
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        keep = None if attention_mask is None else ~attention_mask
        if causal and (seq != seq_k or (keep is not None and mask_type is AttnMaskType.padding_causal)):
            lower = torch.ones(seq, seq_k, dtype=torch.bool, device=query.device).tril(seq_k - seq)
            keep = lower if keep is None else keep & lower
        if query.shape[1] != key.shape[1]:
            # With a mask, enable_gqa would select the kernel that stores all scores.
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        dropout = self.dropout if self.training else 0.0
        # With sequence parallelism the transformer block has forked the generator already.
        fork = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            causal = causal and keep is None
            out = F.scaled_dot_product_attention(query, key, value, keep, dropout, is_causal=causal, scale=self.scale)
        return out.permute(2, 0, 1, 3).reshape(seq, out.shape[0], -1)


def supports(config: TransformerConfig) -> bool:
    """Whether SDPAttention computes what `config` requires."""
    return all(getattr(config, name) == allowed for name, allowed in _SUPPORTED.items())
