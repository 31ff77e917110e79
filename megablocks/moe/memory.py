"""The error of a layer that runs out of memory: its sizes, the memory it needs and has, and what to change."""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.kinds import IMPLS


def out_of_memory(config: MoEConfig, x: Tensor, rows: int, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """Return `error` with sizes and advice. A layer raised it for x (T, H), which fills `rows` rows of its experts."""
    # values of a row in forward: input and output, one or two pre-activations, and the activation
    values = 2 * config.hidden_size + (2 + config.is_gated) * config.ffn_hidden_size
    need = rows * values * x.element_size() / 2**30
    have = "unknown"
    if x.is_cuda:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(x.device))
        have = f"{free:.2f} of {total:.2f} GiB"
    changes = ["fewer tokens a micro-batch"]
    changes += [] if config.recompute_activation else ["recompute_activation=True"]
    if config.capacity_factor is not None:
        changes += ["a smaller capacity_factor or dMoE (no padding)"]
    elif config.mlp_impl in IMPLS and IMPLS[config.mlp_impl].pads:
        changes += ["mlp_impl='grouped' (no padded rows)"]
    changes += ["experts spread over more ranks (expert parallelism)"]
    return torch.OutOfMemoryError(
        f"out of memory in a mixture-of-experts layer on {x.device}: {x.shape[0]} tokens, hidden_size="
        f"{config.hidden_size}, ffn_hidden_size={config.ffn_hidden_size}, num_experts={config.num_experts}, top_k="
        f"{config.top_k}, {x.dtype}; the experts' {rows} rows take about {need:.2f} GiB in forward, free on the "
        f"device: {have}. Try {', '.join(changes)}. {error}"
    )
