"""Megatron's rotary embedding as one kernel each way, `megablocks.ops.rope`.

Without Transformer Engine Megatron rotates queries and keys with six torch operations in forward and seven in backward,
each a pass over memory. `install` makes Megatron's attention call `apply` instead, and changes no file.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import attention
from torch import Tensor

from megablocks.megatron.wrap import wrap
from megablocks.ops.rope import rope


def install() -> None:
    """Let Megatron's attention call `apply`. Call it once per process."""
    wrap(attention, apply_rotary_pos_emb=apply)


def apply(
    original: Any,
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """Wraps Megatron's `apply_rotary_pos_emb`: t (S, B, N, D) and angles (S, 1, 1, R) → (S, B, N, D).

    The original computes packed sequences, other shapes of angles and fused embeddings. Latent attention calls it
    without this wrapper.
    """
    settings = getattr(config, "megablocks", None)  # None: the environment selected it at installation
    wanted = settings is None or settings.rope == "fused"
    one_layout = cu_seqlens is None and t.dim() == 4 and freqs.shape[:-1] == (t.shape[0], 1, 1)
    if wanted and one_layout and not config.apply_rope_fusion:
        return rope(t, freqs.reshape(len(freqs), -1), interleaved=config.rotary_interleaved, scale=mscale)
    return original(t, freqs, config, cu_seqlens, mscale, cp_group)
