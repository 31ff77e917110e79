"""Model FLOPs utilization (MFU): the FLOPs of a dense or mixture-of-experts GPT over the peak rate of known GPUs.

Only matrix products count, with 2 FLOPs per multiply-add: attention projections, causal attention (half of S²), router,
the top-k experts and shared experts of a token, logits. Backward costs twice the forward. Recomputed activations and
padding are not model FLOPs. A pair that a capacity drops counts as if its expert had computed it, and a sliding window
as if it were the whole sequence. Megatron's `num_floating_point_operations` counts the same, except that it omits the
router, counts a quick GEGLU as an MLP without a gate, and counts the weights of a few norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_ARGUMENTS = {
    "head_dim": "kv_channels",
    "top_k": "moe_router_topk",
    "shared_expert_hidden_size": "moe_shared_expert_intermediate_size",
}
"""Fields of `GPTShape` that have other names in Megatron's arguments."""
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of latent attention. Megatron's arguments have them even without it."""


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The sizes that determine the FLOPs of a GPT. Expert widths are per expert. `gated`: three products per MLP.

    mtp_num_layers: layers of multi-token prediction, included in num_layers and num_moe_layers; each has a product
    of two inputs and logits of its own. attention_output_gate: a gate as wide as the queries on attention's output.
    kv_lora_rank and the fields after it belong to latent attention, which uses them instead of head_dim and
    num_query_groups. q_lora_rank 0: the queries have no low rank.
    """

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
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    mtp_num_layers: int = 0
    attention_output_gate: bool = False

    @classmethod
    def of(cls, args: Any, **given: Any) -> GPTShape:
        """The sizes in Megatron's arguments, with 0 for None; `given`: those that the arguments do not contain."""
        latent = () if getattr(args, "multi_latent_attention", False) else _LATENT
        names = [field.name for field in fields(cls) if field.name not in (*given, *latent)]
        found: dict[str, Any] = {name: getattr(args, _ARGUMENTS.get(name, name)) or 0 for name in names}
        return cls(**found, **given)

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads. Values are as wide as keys."""
        return (self.num_query_groups or self.num_attention_heads) * self.head_dim

    @property
    def up_products(self) -> int:
        """Number of products of an MLP that read its input."""
        return 2 if self.gated else 1

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of one layer's attention."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if not self.kv_lora_rank:
            return hidden * ((2 + self.attention_output_gate) * self.query_width + 2 * self.key_width)
        queries = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        return (
            (self.q_lora_rank * (hidden + queries) if self.q_lora_rank else hidden * queries)
            + hidden * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
            + self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
        )

    @property
    def attended_width(self) -> int:
        """Width of the keys plus width of the values of a layer's heads; a query has a product with both."""
        if not self.kv_lora_rank:
            return 2 * self.query_width
        return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim + self.v_head_dim)


def forward_flops_per_token(shape: GPTShape) -> dict[str, float]:
    """Forward FLOPs of one token, by part of the model."""
    hidden, products = shape.hidden_size, shape.up_products + 1
    dense_layers, moe = shape.num_layers - shape.num_moe_layers, shape.num_moe_layers
    return {
        "attention_projections": shape.num_layers * 2.0 * shape.attention_weights,
        "attention": shape.num_layers * shape.seq_length * shape.attended_width,  # 2 FLOPs · S/2 keys on average
        "mlp": dense_layers * 2.0 * products * hidden * shape.ffn_hidden_size,
        "router": moe * 2.0 * hidden * shape.num_experts,
        "experts": moe * 2.0 * products * hidden * shape.moe_ffn_hidden_size * shape.top_k,
        "shared_experts": moe * 2.0 * products * hidden * shape.shared_expert_hidden_size,
        "prediction": shape.mtp_num_layers * 2.0 * 2 * hidden * hidden,
        "logits": (1 + shape.mtp_num_layers) * 2.0 * hidden * shape.vocab_size,
    }


def training_flops_per_token(shape: GPTShape) -> float:
    """Forward and backward FLOPs of one token. Backward has two products for each product of the forward."""
    return 3 * sum(forward_flops_per_token(shape).values())


class Gpu(NamedTuple):
    """Peak dense bf16 TFLOP/s (V100: fp16) and memory bandwidth from the data sheet; memory as CUDA reports it.

    None: the card was sold with several memories, and its name does not say which one it has.
    """

    tflops: float
    tb_per_second: float | None = None
    gib: float | None = None


GPUS = {
    "GB200": Gpu(2500.0, 8.0, 184.0),
    "B200": Gpu(2250.0, 8.0, 178.0),
    "GH200": Gpu(989.4),
    "H200 NVL": Gpu(835.5, 4.8, 139.8),
    "H200": Gpu(989.4, 4.8, 139.8),
    "H100 PCIe": Gpu(756.0, 2.0, 79.1),
    "H100 NVL": Gpu(835.0, 3.9, 93.0),
    "H100": Gpu(989.4, 3.35, 79.1),
    "A100 80GB PCIe": Gpu(312.0, 1.94, 79.1),
    "A100 80GB": Gpu(312.0, 2.04, 79.1),
    "A100 40GB": Gpu(312.0, 1.56, 39.4),
    "A100": Gpu(312.0),
    "A800": Gpu(312.0),
    "L40S": Gpu(362.05, 0.86, 44.4),
    "A40": Gpu(149.7, 0.70, 44.4),
    "V100 PCIE 32GB": Gpu(112.0, 0.90, 31.7),
    "V100 PCIE": Gpu(112.0, 0.90),
    "V100 32GB": Gpu(125.0, 0.90, 31.7),
    "V100": Gpu(125.0, 0.90),
}
"""GPUs by words of the device name. The first match counts."""


def of_device(table: Mapping[str, T], device_name: str) -> T | None:
    """The entry of a device in a table by words of its name, such as `GPUS`; None if the name is unknown.

    No number is better than a wrong one. A MIG slice ("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is only a part of the
    device, so it counts as unknown.
    """
    if " MIG " in f" {device_name} ":
        return None
    for words, found in table.items():
        if all(re.search(rf"\b{word}\b", device_name) for word in words.split()):
            return found
    return None


def peak_flops(device_name: str) -> float | None:
    """Peak dense 16-bit FLOP/s of a GPU; None if the name is unknown."""
    gpu = of_device(GPUS, device_name)
    return gpu and gpu.tflops * 1e12


def peak_bandwidth(device_name: str) -> float | None:
    """Peak bytes/s of a GPU's memory; None if unknown."""
    gpu = of_device(GPUS, device_name)
    return gpu and gpu.tb_per_second and gpu.tb_per_second * 1e12


def memory_gib(device_name: str) -> float | None:
    """GiB of a GPU's memory; None if unknown."""
    gpu = of_device(GPUS, device_name)
    return gpu and gpu.gib


def mfu(tokens_per_second: float, shape: GPTShape, device_name: str, num_devices: int) -> float | None:
    """Model FLOPs utilization, in [0, 1], of `num_devices` equal devices; None if the device is unknown."""
    peak = peak_flops(device_name)
    if peak is None:
        return None
    return tokens_per_second * training_flops_per_token(shape) / (peak * num_devices)
