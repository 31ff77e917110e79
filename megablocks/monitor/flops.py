"""Model FLOPs utilization (MFU): the FLOPs of a dense or mixture-of-experts GPT over the peak rate of known GPUs.

Only matrix products count, with 2 FLOPs per multiply-add: attention projections, causal attention (half of S²), router,
the top-k experts and shared experts of a token, logits. Backward costs twice the forward. Recomputed activations,
padding and dropped tokens are not model FLOPs. Megatron's `num_floating_point_operations` counts the same, except that
it leaves out the router.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The sizes that determine the FLOPs of a GPT. Expert widths are per expert. `gated`: three products per MLP."""

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    num_attention_heads: int
    head_dim: int
    num_query_groups: int | None = None
    ffn_hidden_size: int = 0
    gated: bool = False
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_hidden_size: int = 0


def forward_flops_per_token(shape: GPTShape) -> dict[str, float]:
    """Forward FLOPs of one token, by part of the model."""
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    groups = shape.num_query_groups or shape.num_attention_heads
    products = 3 if shape.gated else 2
    dense_layers = shape.num_layers - shape.num_moe_layers
    moe = shape.num_moe_layers
    return {
        "attention_projections": shape.num_layers * 2.0 * hidden * (2 * query + 2 * groups * shape.head_dim),
        "attention": shape.num_layers * 2.0 * shape.seq_length * query,  # 2 products · 2 FLOPs · S/2 keys on average
        "mlp": dense_layers * 2.0 * products * hidden * shape.ffn_hidden_size,
        "router": moe * 2.0 * hidden * shape.num_experts,
        "experts": moe * 2.0 * products * hidden * shape.moe_ffn_hidden_size * shape.top_k,
        "shared_experts": moe * 2.0 * products * hidden * shape.shared_expert_hidden_size,
        "logits": 2.0 * hidden * shape.vocab_size,
    }


def training_flops_per_token(shape: GPTShape) -> float:
    """Forward and backward FLOPs of one token. Backward has two products for each product of the forward."""
    return 3 * sum(forward_flops_per_token(shape).values())


PEAK_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.05),
    ("A40", 149.7),
    ("V100", 125.0),
)
"""Peak dense bf16 TFLOP/s (V100: fp16), by words of the device name. The first match counts. Source: data sheets."""

PEAK_TB_PER_SECOND = (
    ("GB200", 8.0),
    ("B200", 8.0),
    ("H200", 4.8),
    ("H100 PCIe", 2.0),
    ("H100 NVL", 3.9),
    ("H100", 3.35),
    ("A100 80GB", 2.04),
    ("A100 40GB", 1.56),
    ("L40S", 0.86),
    ("A40", 0.70),
    ("V100", 0.90),
)
"""Peak memory bandwidth in TB/s, in the same form. Cards that were sold with several memories and do not tell in their
name which one they have, such as GH200, are left out."""


MEMORY_GIB = (
    ("GB200", 184.0),
    ("B200", 178.0),
    ("H200", 139.8),
    ("H100 NVL", 93.0),
    ("H100", 79.1),
    ("A100 80GB", 79.1),
    ("A100 40GB", 39.4),
    ("L40S", 44.4),
    ("A40", 44.4),
    ("V100 32GB", 31.7),
)
"""Memory in GiB, as CUDA gives it to programs, in the same form."""


def figure(table: tuple[tuple[str, float], ...], device_name: str) -> float | None:
    """The entry of a device in one of these tables; None if the name is unknown.

    No figure is better than a wrong one. A MIG slice ("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is only a part of the
    device, so it counts as unknown.
    """
    if " MIG " in f" {device_name} ":
        return None
    for part, rate in table:
        if all(re.search(rf"\b{word}\b", device_name) for word in part.split()):
            return rate
    return None


def _rate(table: tuple[tuple[str, float], ...], device_name: str) -> float | None:
    found = figure(table, device_name)
    return None if found is None else found * 1e12


def peak_flops(device_name: str) -> float | None:
    """Peak dense 16-bit FLOP/s of a GPU; None if the name is unknown."""
    return _rate(PEAK_BF16_TFLOPS, device_name)


def peak_bandwidth(device_name: str) -> float | None:
    """Peak bytes/s of a GPU's memory; None if the name is unknown."""
    return _rate(PEAK_TB_PER_SECOND, device_name)


def mfu(tokens_per_second: float, shape: GPTShape, device_name: str, num_devices: int) -> float | None:
    """Model FLOPs utilization, in [0, 1], of `num_devices` equal devices; None if the device is unknown."""
    peak = peak_flops(device_name)
    if peak is None:
        return None
    return tokens_per_second * training_flops_per_token(shape) / (peak * num_devices)
