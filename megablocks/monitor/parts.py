"""The parts of a training step, and the table that gives a kernel to one of them."""

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
    """A kernel belongs to `part` if one of the patterns is found. Kernels and ops: any name; part: of the range."""

    part: str
    kernel: str = ""
    op: str = ""
    within: str = ""


RULES = (
    Rule(COMMUNICATION, kernel=r"nccl|^gloo:|^c10d::", op=r"^c10d::|^gloo:"),
    Rule("optimizer", op=r"^Optimizer\.step#", within=r"^optimizer$", kernel=r"adam"),
    # Megatron adds a gradient to the main gradient in a hook of the node that would accumulate it.
    Rule("gradients", op=r"AccumulateGrad|^Optimizer\.zero_grad#|_foreach_norm|l2norm", kernel=r"multi_tensor_l2norm",
         within=r"^gradients$"),
    Rule("embedding and loss", op=r"(?i)cross_?entropy|embedding", kernel=r"(?i)cross_?entropy|nll|embedding",
         within=r"^embedding and loss$"),
    Rule("attention", op=r"attention", kernel=r"(?i)flash|fmha|attention"),
    Rule("norms", op=r"(?i)(layer|rms)_?norm", kernel=r"(?i)(layer|rms)_?norm", within=r"^norms$"),
    Rule("routing", op=r"RouterGating|megablocks::\w*(rout|topk|top_k|histogram|sort|dispatch)|AuxLoss",
         kernel=r"(?i)router|topk|histogram|expert_offsets", within=r"^routing$"),
    Rule(COPIES, op=r"^aten::(copy_|contiguous|clone|_to_copy|to|cat)$", kernel=r"^Mem(cpy|set)"),
    Rule("attention", within=r"^attention$"),  # after the copies and before the products of an unfused attention
    Rule("experts", op=r"^(megablocks|fused|scattermoe)::", kernel=r"(?i)grouped|gathered|ragged|scatter2scatter",
         within=r"^experts$"),
    Rule("dense products", op=r"^aten::(mm|addmm|bmm|linear|matmul)$|LinearWithGrad", kernel=r"gemm|nvjet|cutlass",
         within=r"^dense products$"),
    Rule("elementwise", op=r"^aten::", within=r"^elementwise$"),
)  # fmt: skip
"""In order: the first rule that fits counts. In a CUDA graph only the names of kernels are known."""
_COMPILED = [tuple(re.compile(p) if p else None for p in rule[1:]) for rule in RULES]


def part_of(kernel: Kernel) -> str:
    """The part of a kernel."""
    for rule, (name, op, within) in zip(RULES, _COMPILED, strict=True):
        if (
            (name and name.search(kernel.name))
            or (within and within.search(kernel.part))
            or (op and any(op.search(caller) for caller in kernel.callers))
        ):
            return rule.part
    return OTHER
