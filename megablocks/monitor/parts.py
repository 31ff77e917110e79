"""The parts of a training step, and the table that assigns a kernel to one of them."""

from __future__ import annotations

import re
from typing import NamedTuple

from megablocks.monitor.trace import Kernel

IDLE, OTHER, COMMUNICATION, COPIES = "idle", "other", "communication", "copies"
PARTS = (
    "experts", "routing", "attention", "dense products", "norms", "embedding and loss", "elementwise",
    "optimizer", "gradients", COMMUNICATION, COPIES, OTHER, IDLE,
)  # fmt: skip


class Rule(NamedTuple):
    """A kernel belongs to `part` if one of the patterns is found.

    kernel: in its name. op: in a line of its callers, the innermost first. within: in the part of the driver's range.
    """

    part: str
    kernel: str = ""
    op: str = ""
    within: str = ""


_ROUTING_OPS = r"router|rounded_router|build_dispatch|pad_indices|count_valid|sparse_topology"
_ROUTING_KERNELS = r"route|route_backward|finish|loads|select|odds|count|scan|place|pad|topology|weight_backward"
_EXPERT_OPS = (
    r"fused_\w+|down_gradient|activate_and_project|grouped_\w+|gathered_\w+|scattered_\w+|sparse_\w+|linear_combine|"
    r"parallel_linear|combine\w*|gather|replicate|bin_sum|add_expert_bias|expert_sum|output_bias_\w+|clamped_gate|"
    r"activation\w*|d?e?quantize"
)
_EXPERT_KERNELS = (
    r"\w*ragged_[mk]|(?:list|add)_pieces|_rows|_weights|_pair_mm|\w*up|down_gradient|_expand|_combine\w*|_?sdd|_?spmm|_mlp_gradient|"
    r"_forward|_backward|_clamped\w*|_add_bias|_expert_(sum|dot)|_\w*quantize"
)

RULES = (
    Rule(COMMUNICATION, kernel=r"nccl|^gloo:|^c10d::|^to_(experts|home)_kernel", op=r"^c10d::|^gloo:"),
    Rule("optimizer", op=r"^Optimizer\.step#", within=r"^optimizer$", kernel=r"adam"),
    # Megatron adds a gradient to the main gradient in a hook of the node that would accumulate it. The norms come from
    # clipping and from the guard against NaN.
    Rule("gradients", op=r"AccumulateGrad$|^Optimizer\.zero_grad#|(vector|foreach)_norm$|l2norm", within=r"^gradients$",
         kernel=r"l2norm|^_square_sum_kernel"),
    # Autograd adds the two gradients of a tensor before it calls the node that made it: a residual, or the tokens that
    # go to the router and to the experts.
    Rule("routing", op=r"^aten::add_?\nautograd::engine::evaluate_function: RouterGating"),
    Rule("norms", op=r"^aten::add_?\nautograd::engine::evaluate_function"),
    Rule("embedding and loss", op=r"(?i)cross_?entropy|embedding",
         kernel=r"(?i)cross_?entropy|nll|embedding|^_(sums|gradient)_kernel", within=r"^embedding and loss$"),
    Rule("attention", op=r"attention", kernel=r"(?i)flash|fmha|sdpa|attention"),
    Rule("norms", op=r"(?i)(layer|rms)_?norm|^(megablocks::)?(add_)?norm(_b|B|$)",
         kernel=r"(?i)(layer|rms)_?norm|\bln_[fb]wd|^_(norm|add_partials)_|^triton_\w+_native_dropout",
         within=r"^norms$"),
    Rule("routing", op=rf"^(megablocks::)?({_ROUTING_OPS})(Backward)?$|RouterGating|AuxLoss|topk",
         kernel=rf"^(_({_ROUTING_KERNELS})|limit)_kernel|(?i:topk)", within=r"^routing$"),
    Rule(COPIES, op=r"^aten::(copy_|contiguous|clone|_to_copy|to|cat)$", kernel=r"^Mem(cpy|set)"),
    Rule("attention", within=r"^attention$"),  # after the copies and before the products of an unfused attention
    Rule("experts", op=rf"^(megablocks::)?({_EXPERT_OPS})(Backward)?$", kernel=rf"^({_EXPERT_KERNELS})_kernel",
         within=r"^experts$"),
    Rule("dense products", op=r"^aten::(mm|addmm|bmm|linear|matmul)$|LinearWithGrad", kernel=r"gemm|nvjet|cutlass",
         within=r"^dense products$"),
    Rule("gradients", op=r"^aten::zero_$"),
    Rule("elementwise", op=r"dropout|^CompiledFunction|^aten::(gelu|silu|relu)", kernel=r"^triton_|^_rope_kernel",
         within=r"^elementwise$"),
)  # fmt: skip
"""Rules in order: the first that fits counts. Residuals and their dropout count as norms, since one kernel
computes both. In a CUDA graph only the names of kernels are known."""


def part_of(kernel: Kernel) -> str:
    """The part of a kernel."""
    texts = (kernel.name, "\n".join(kernel.callers), kernel.part)
    for part, *patterns in RULES:
        if any(one and re.search(one, text, re.MULTILINE) for one, text in zip(patterns, texts, strict=True)):
            return part
    return OTHER
