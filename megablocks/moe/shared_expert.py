"""A shared expert: a dense MLP that computes every token, in addition to the routed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megablocks.config import MoEConfig, refuse
from megablocks.ops.activation import activate
from megablocks.ops.grouped.rows_linear import rows_linear


class SharedExpert(nn.Module):
    """down(act(up(x))), or down(act(gate_proj(x)) ⊙ up(x)) when gated; times sigmoid(x·g) with `shared_expert_gate`.

    The parameters have megablocks 0.10's names and order: up_proj, down_proj, gate_proj.

    Args:
        config: activation, hidden_size, shared_expert_hidden_size, shared_expert_gate.
        bias: biases in the linear layers.
        linear, linear_kwargs: class of the linear layers, called as linear(in, out, bias=, device=, **kwargs). If it is
            not torch's, put the dtype into kwargs, under the name that the class uses.
        device, dtype: of the parameters; torch's defaults if None.

    Raises:
        ValueError: the config has no shared_expert_hidden_size.
        ConfigError: batch_invariant with a class of linear layers that is not torch's.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        bias: bool = False,
        linear: Callable[..., nn.Module] = nn.Linear,
        linear_kwargs: dict[str, Any] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = config.shared_expert_hidden_size
        if width is None:
            raise ValueError("shared_expert_hidden_size=None: must be an integer >= 1")
        if config.batch_invariant and linear is not nn.Linear:
            refuse("batch_invariant", True, f"needs torch's Linear in the shared expert, not {linear}")
        self.config = config
        kwargs = {"bias": bias, "device": device, **(linear_kwargs or {})}
        if linear is nn.Linear:
            kwargs.setdefault("dtype", dtype)
        self.up_proj = linear(config.hidden_size, width, **kwargs)
        self.down_proj = linear(width, config.hidden_size, **kwargs)
        self.gate_proj = linear(config.hidden_size, width, **kwargs) if config.is_gated else None
        gated = config.shared_expert_gate
        self.gate = nn.Parameter(torch.zeros(config.hidden_size, device=device, dtype=dtype)) if gated else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the projections' weights from normals with the config's stds, and their biases and the gate with 0."""
        std, down_std = self.config.init_std, self.config.output_init_std
        for name, parameter in self.named_parameters():
            if name == "gate" or name.endswith("bias"):
                parameter.zero_()
            else:
                is_down = name == "down_proj.weight"
                nn.init.normal_(parameter, std=down_std if is_down and down_std is not None else std)

    def forward(self, x: Tensor) -> Tensor:
        """x (T, H) → (T, H)."""
        if self.gate_proj is None:
            act = activate(self._project(self.up_proj, x), None, self.config.act)
        else:
            act = activate(self._project(self.gate_proj, x), self._project(self.up_proj, x), self.config.act)
        out = self._project(self.down_proj, act)
        if self.gate is None:
            return out
        linear = rows_linear if self.config.batch_invariant else nn.functional.linear
        return out * torch.sigmoid(linear(x, self.gate[None].to(x.dtype)))

    def _project(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return layer(x). With batch_invariant a kernel computes it that treats each row alone."""
        if not self.config.batch_invariant:
            return layer(x)
        assert isinstance(layer, nn.Linear)
        return rows_linear(x, layer.weight, layer.bias)
