"""LayerNorm and RMSNorm for Megatron without Transformer Engine or apex.

Megatron's own fallback (`WrappedTorchNorm`) refuses sequence parallelism and zero-centered weights. With sequence
parallelism each tensor-parallel rank normalizes its own part of the sequence. So the gradients of the norm's parameters
are partial sums, which Megatron adds up if the parameters are marked `sequence_parallel`.

On a GPU the kernels of `megablocks.ops.norm` compute it unless `--megablocks-norm torch` is given. torch's pass for the
gradients of weight and bias takes as long as its two other passes together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.config import refuse
from megablocks.megatron.settings import settings_of
from megablocks.moe.main_grad import is_split
from megablocks.ops.add_norm import add_norm, kernels_take
from megablocks.ops.norm import norm


class Terms(NamedTuple):
    """Terms of a sum that a norm reads: residual + dropout(x + bias). p: of dropout."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    p: float


class Normalized(NamedTuple):
    """What the norm `by` computed with a sum: its result y and its factor of each row. version: of the sum's values."""

    by: Norm
    y: Tensor
    scale: Tensor
    version: int


class Norm(torch.nn.Module):
    """Normalizes (…, H) over H by `config.normalization`. Parameters: weight (H,) and, for LayerNorm, bias (H,).

    Called with `Terms`, it returns their sum, with a `Normalized` as an attribute. Called with this sum, it returns the
    norm from there, unless something has written to the sum. Both are calls of the module, because the hooks of
    Megatron's distributed optimizer wait for the weights.

    The arguments are those of Megatron's LayerNormBuilder. `persist_layer_norm`, which selects a kernel of apex, has no
    effect. Raises ConfigError for a normalization other than LayerNorm or RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            refuse("normalization", config.normalization, "must be LayerNorm or RMSNorm")
        self.normalized_shape = (hidden_size,)
        self.eps = eps
        self.fused = settings_of(config).norm != "torch"
        self.split = False  # whether FSDP ever split the weight
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def is_fused(self, x: Tensor) -> bool:
        """Whether our kernels compute the norm of x."""
        return self.fused and kernels_take(x)

    def takes(self, terms: Terms) -> bool:
        """Whether the norm can be called with the terms.

        Not if its weight was ever split: FSDP gathers it for the norm's own layer, and frees it before our backward.
        Not with a hook on the result or another forward, which would also change the sum, and not in inference mode,
        where a tensor does not count what writes to it.
        """
        self.split = self.split or is_split(self.weight)
        plain = type(self).forward is Norm.forward and not self._forward_hooks
        fits = terms.x.dtype == terms.residual.dtype and terms.p < 1 and self.is_fused(terms.x)
        return fits and plain and not self.split and not torch.is_inference_mode_enabled()

    def forward(self, x: Tensor | Terms) -> Tensor:
        if isinstance(x, Terms):
            total, y, scale = add_norm(
                x.x, x.residual, self.weight, self.bias,
                x_bias=x.bias, p=x.p, eps=self.eps, zero_centered=self.zero_centered,
            )  # fmt: skip
            total.normalized = Normalized(self, y, scale, total._version)  # type: ignore[attr-defined]
            return total
        made: Normalized | None = getattr(x, "normalized", None)
        # A checkpoint computes without a graph, and then gives the sum one, which its norm lacks.
        if made is not None and made.by is self and made.version == x._version:
            if made.y.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return made.y
        if self.is_fused(x):
            return norm(x, self.weight, self.bias, eps=self.eps, zero_centered=self.zero_centered)
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)


class AllHeadsNorm(Norm):
    """Normalizes queries or keys (S, B, heads, D) over all heads of a token, as OLMoE does. weight: (heads · D,).

    of_keys: whether it normalizes the keys, which have one head per query group. Raises ConfigError with tensor
    parallelism, because then no rank has all heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, of_keys: bool) -> None:
        if (size := config.tensor_model_parallel_size) > 1:
            rule = "must be 1 with --megablocks-qk-norm all, which needs all heads on each rank"
            refuse("tensor_model_parallel_size", size, rule)
        heads = config.num_query_groups if of_keys else config.num_attention_heads
        assert heads is not None
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: Tensor | Terms) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(x.flatten(-2)).view(x.shape)
