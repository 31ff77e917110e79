"""What to compile for each architecture: every kernel of the package, launched as the ops launch it.

    python tests/ops/compile_cases.py ARCHITECTURE [FAMILY…]

prints one line of JSON: kernel → [most shared bytes, binaries, products fused across lanes].

A family is a function below that calls launchers with tensors on the CPU (see megablocks.testing.compile_only) and
names its kernels. A new kernel is put into a family; test_compile.py fails while one is missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megablocks.ops.routing.router import RouterOptions


def fused_across_lanes(ptx: str) -> int:
    """Multiply-adds onto what a shuffle brought: each lane fuses its own product with another's rounded one.

    The lanes of such a sum hold different last bits: a race where all of them store it in one place, a disagreement
    where each decides by it.
    """
    shuffled = set(re.findall(r"shfl\.sync\.\w+\.b32\s+(%\w+)", ptx))
    moved = dict(re.findall(r"mov\.b32\s+(%\w+), (%\w+);", ptx))
    addends = re.findall(r"fma\.rn(?:\.ftz)?\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx)
    return sum(moved.get(a, a) in shuffled for a in addends)


EVERY = (torch.bfloat16, torch.float16, torch.float32)
ARCHITECTURES = (80, 86, 90, 100, 120)


@dataclass(frozen=True)
class Family:
    compile: Callable[[], None]
    kernels: frozenset[str]
    architectures: tuple[int, ...] = ARCHITECTURES


FAMILIES: dict[str, Family] = {}


def family(module: str, *kernels: str, architectures: tuple[int, ...] = ARCHITECTURES) -> Callable[..., None]:
    """Register a function that compiles these kernels of megablocks.ops.`module`, for these architectures."""

    def register(compile: Callable[[], None]) -> None:
        names = frozenset(f"megablocks.ops.{module}.{kernel}" for kernel in kernels)
        FAMILIES[compile.__name__] = Family(compile, names, architectures)

    return register


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


@family("routing.dispatch_triton", "_count_kernel", "_scan_kernel", "_place_kernel")
def routing() -> None:
    from megablocks.ops.routing.dispatch_triton import dispatch_launch

    for experts, top_k in product((8, 128, 512), (1, 8, None)):
        dispatch_launch(ints(4096), ints(4096), 512, experts, top_k)


@family(
    "routing.rounding_triton",
    *("_keys_kernel", "_odds_kernel", "_loads_kernel", "_select_kernel", "_count_kernel", "_place_kernel"),
)
def rounding() -> None:
    from megablocks.ops.routing.rounding import ROUNDINGS, STOCHASTIC
    from megablocks.ops.routing.rounding_triton import place_launch, round_launch, select_launch

    for experts, top_k, padding in ((8, 1, None), (128, 8, torch.zeros(512, dtype=torch.bool)), (600, 8, None)):
        ids = torch.zeros(512, top_k, dtype=torch.int64)
        select_launch(torch.zeros(512, experts), ids, torch.zeros(experts, dtype=torch.int64), padding, 2000)
        place_launch(torch.zeros(experts, 512, dtype=torch.int8), ints(512), 2000, torch.zeros(512, experts))
        for rule in ROUNDINGS:
            draw = torch.zeros(experts) if rule in STOCHASTIC else None
            round_launch(ints(experts, 512), ints(experts).long(), ints(3).long(), draw, rule, 128)


@family("permute.permute_triton", "_expand_kernel", "_combine_kernel", "_combine_backward_kernel")
def permute() -> None:
    from megablocks.ops.permute.permute_triton import combine_backward_launch, combine_launch, expand_launch

    for dtype, hidden in product(EVERY, (512, 1536, 8192)):
        x, rows, index, weight = torch.zeros(8, hidden, dtype=dtype), ints(32), ints(9), torch.zeros(32)
        expanded = expand_launch(x, rows, index, rows)
        expand_launch(x, rows, index, rows, True)
        for w in (weight, None):
            combine_launch(expanded, w, rows, rows, index)
        for kept in (expanded, None):
            for padded in (False, True):
                combine_backward_launch(x, kept, weight, rows, rows, index, padded)


def router_cases() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, RouterOptions]]:
    """Logits, bias, padding mask and options."""
    from megablocks.ops.routing.router import RouterOptions

    for dtype, (experts, k) in product((torch.bfloat16, torch.float32), ((8, 1), (128, 8), (130, 8), (1000, 32))):
        logits, bias = torch.zeros(64, experts, dtype=dtype), torch.zeros(experts)
        yield logits, None, None, RouterOptions(k, False, False, 0, 1.0, 0.1, 0.1)
        yield logits, bias, torch.zeros(64, dtype=torch.bool), RouterOptions(k, True, False, 2, 2.5, 0.1, 0.1)
        yield logits, bias, None, RouterOptions(k, False, True, 1, 1.0, 0.0, 0.0)


@family("routing.router_triton", "_route_kernel", "_finish_kernel")
def router() -> None:
    from megablocks.ops.routing.router_triton import route_launch, score_launch

    for logits, bias, mask, options in router_cases():
        route_launch(logits, bias, mask, options)
        score_launch(logits, bias, mask, None, (torch.zeros(logits.shape), ints(*logits.t().shape)), options)


@family("routing.router_backward_triton", "_route_backward_kernel", "_weight_backward_kernel", "_chosen_slopes_kernel")
def router_backward() -> None:
    from megablocks.ops.routing import router_backward_triton as backward

    for logits, _, mask, options in router_cases():
        (tokens, experts), one = logits.shape, torch.ones(())
        pairs = tokens * options.top_k
        counts = (ints(experts).long(), ints(3).long())
        grads = (torch.zeros(pairs), one, one, torch.ones(experts))
        backward.route_backward_launch(logits, mask, ints(pairs), *counts, grads, options)
        kept = {"flags": torch.zeros(experts, tokens, dtype=torch.int8), "ends": ints(tokens)}
        backward.route_backward_launch(logits, mask, None, *counts, grads, options, **kept)
        if options.after:
            backward.weight_backward_launch(grads[0], ints(pairs), grads[0], experts, logits.dtype, options)
            backward.chosen_slopes_launch(grads[0], grads[0], ints(pairs), options.top_k, options.scaling)


@family("permute.padded_triton", "_pad_kernel", "_replicate_kernel", "_bin_sum_kernel")
def padded() -> None:
    from megablocks.ops.permute.padded_triton import bin_sum_launch, pad_launch, replicate_launch

    for dtype, experts in product(EVERY, (8, 512)):
        replicate_launch(torch.zeros(2, experts, dtype=dtype), ints(experts), 64)
        bin_sum_launch(torch.zeros(2, 64, dtype=dtype), ints(experts))

    for experts, index in product((8, 128, 512), (ints(32), None)):
        pad_launch(ints(experts), ints(experts), 0, 64, ints(32), index, index, 2)
        pad_launch(ints(experts), None, 4, 4 * experts, ints(32), index, index, 2)


@family("activation_triton", "_forward_kernel", "_backward_kernel")
def activation() -> None:
    from megablocks.ops.activation import GATED, UNARY
    from megablocks.ops.activation_triton import activation_backward_launch, activation_launch

    for dtype, name, approximate in product(EVERY, (*UNARY, *GATED), ("tanh", "none")):
        z = torch.zeros(64, dtype=dtype)
        gate = z if name in GATED else None
        activation_launch(z, gate, name, approximate)
        activation_backward_launch(z, z, gate, name, approximate)


@family("quant.quant_triton", "_quantize_kernel", "_dequantize_kernel")
def quant() -> None:
    from megablocks.ops.quant.quant_triton import dequantize_launch, quantize_launch

    for dtype, width, num_bits in product(EVERY, (20, 1024), (8, 4)):
        codes, scales = quantize_launch(torch.zeros(8, width, dtype=dtype), num_bits)
        dequantize_launch(codes, scales, num_bits, width, dtype)


@family("grouped.grouped_mm_triton", "_ragged_m_kernel", "_ragged_k_kernel")
def grouped() -> None:
    from megablocks.ops.grouped.grouped_mm_triton import ragged_k, ragged_m

    rows = 1024
    for dtype in (torch.bfloat16, torch.float32):
        x, offsets, gather = torch.zeros(rows, 256, dtype=dtype), ints(33), ints(rows)
        for n, order in product((64, 128, 512), (None, gather)):
            w = torch.zeros(32, 256, n, dtype=dtype)
            ragged_m(x, w, offsets, order)
            ragged_m(x, w.mT.contiguous().mT, offsets, order)
            ragged_k(x, torch.zeros(rows, n, dtype=dtype), offsets, order)
            ragged_k(x, torch.zeros(rows, n, dtype=dtype), offsets, order, gather_a=order is not None)
            ragged_k(x, torch.zeros(rows, n, dtype=dtype), offsets, order, add_to=torch.zeros(32, 256, n))


@family("grouped.grouped_mm_hopper_kernel", "ragged_m_kernel", architectures=(90,))
def grouped_hopper() -> None:
    from megablocks.ops.grouped.grouped_mm_hopper import ragged_m, ragged_m_outer, ragged_m_sum

    # the shapes reach each tile of choose_m
    rows = 1024
    for (k, n), transposed in product(((256, 128), (1024, 512), (4096, 1024)), (False, True)):
        x, w = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(16, k, n, dtype=torch.bfloat16)
        w = w.mT.contiguous().mT if transposed else w
        for gather in (None, ints(rows)):
            ragged_m(x, w, ints(17), gather)
        ragged_m_sum(x, w, x, w, ints(17))
        outer = torch.zeros(rows), torch.zeros(16, n, dtype=torch.bfloat16)
        for x2, w2 in ((None, None), (x, w)):
            ragged_m_outer(x, w, x2, w2, *outer, ints(17))


@family("grouped.grouped_mm_hopper_dw", "ragged_k_kernel", architectures=(90,))
def grouped_hopper_dw() -> None:
    from megablocks.ops.grouped.grouped_mm_hopper import ragged_k, ragged_k_pair

    for m, n in ((64, 128), (128, 128), (512, 512)):  # each tile of choose_k
        a, b = torch.zeros(1024, m, dtype=torch.bfloat16), torch.zeros(1024, n, dtype=torch.bfloat16)
        for gather in (None, ints(1024)):
            ragged_k(a, b, ints(17), gather)
            ragged_k(a, b, ints(17), gather, add_to=torch.zeros(16, m, n))
            ragged_k_pair(a, a, b, ints(17), gather)
            ragged_k_pair(a, a, b, ints(17), gather, add_to=(torch.zeros(16, m, n), torch.zeros(16, m, n)))


@family("grouped.bias_triton", "_add_bias_kernel", "_expert_sum_kernel")
def bias() -> None:
    from megablocks.ops.grouped.bias_triton import add_expert_bias_launch, expert_sum_launch

    for dtype, experts, width in product(EVERY, (8, 512), (20, 1024)):
        rows = torch.zeros(64, width, dtype=dtype)
        add_expert_bias_launch(rows, torch.zeros(experts, width, dtype=dtype), ints(experts + 1))
        expert_sum_launch(rows, ints(experts + 1))


@family("fused.gradient_triton", "_mlp_gradient_kernel")
def fused_gradient() -> None:
    from megablocks.ops.activation import GATED, UNARY
    from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

    for dtype, width, name in product(EVERY, (20, 256, 4096), (*UNARY, *GATED)):
        z, gate = torch.zeros(8, width, dtype=dtype), torch.zeros(8, width, dtype=dtype) if name in GATED else None
        mlp_gradient_launch(z, z, gate, torch.zeros(8), ints(8), ints(5), name, "tanh")


@family("fused.gradient_hopper_kernel", "down_gradient_kernel", architectures=(90,))
def fused_gradient_hopper() -> None:
    from megablocks.ops.activation import GATED, UNARY
    from megablocks.ops.fused.gradient_hopper import down_gradient

    rows = 256
    for name, hidden in (*product((*UNARY, *GATED), (200,)), ("gelu", 4096), ("swiglu", 4096)):  # each tile
        dy, w2 = torch.zeros(64, hidden, dtype=torch.bfloat16), torch.zeros(16, 96, hidden, dtype=torch.bfloat16)
        z = torch.zeros(rows, 96, dtype=torch.bfloat16)
        rest = torch.zeros(rows), ints(rows), ints(rows), ints(17), name, "none" if hidden == 200 else "tanh"
        down_gradient(dy, w2, z, z if name in GATED else None, *rest)


@family("fused.up_triton", "_up_kernel")
def fused_up_twin() -> None:
    from megablocks.ops.activation import GATED, UNARY
    from megablocks.ops.fused.up_triton import up

    for dtype, (name, inner) in product(EVERY, product((*UNARY, *GATED), (64, 512))):
        x, w = torch.zeros(64, 256, dtype=dtype), torch.zeros(8, inner, 256, dtype=dtype)
        v, bias = w if name in GATED else None, torch.zeros(8, inner, dtype=dtype)
        up(x, w, v, bias, None if v is None else bias, ints(4096), ints(9), name, "tanh")


@family("fused.up_hopper_kernel", "up_kernel", architectures=(90,))
def fused_up() -> None:
    from megablocks.ops.activation import GATED, UNARY
    from megablocks.ops.fused.up_hopper import up

    rows = 256
    for name in (*UNARY, *GATED):
        x, w = torch.zeros(64, 200, dtype=torch.bfloat16), torch.zeros(16, 96, 200, dtype=torch.bfloat16)
        v = w if name in GATED else None
        bias = torch.zeros(16, 96, dtype=torch.bfloat16)
        up(x, w, v, None, None, ints(rows), ints(17), name, "tanh")
        up(x, w, v, bias, None if v is None else bias, ints(rows), ints(17), name, "none")


@family("scattered.scattered_triton", "_rows_kernel", "_weights_kernel")
def scattered() -> None:
    from megablocks.ops.scattered.scattered_triton import rows_launch, weights_launch

    rows = 4096
    for dtype in (torch.bfloat16, torch.float32):
        order, gate, ends = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), torch.zeros(32, dtype=torch.int64)
        for n, k in ((64, 256), (128, 256), (512, 256), (65, 73)):  # one element a thread where rows are odd
            x, tokens = torch.zeros(rows, n, dtype=dtype), torch.zeros(rows // 8, k, dtype=dtype)
            w, bias = torch.zeros(32, n, k, dtype=dtype).mT, torch.zeros(32, n, dtype=dtype)
            up = (None, None, None, None, 1, None)
            rows_launch(tokens, w, ends, rows, order, 8, None, None, *up, True)
            rows_launch(tokens, w, ends.int(), rows, order.int(), 1, None, bias, *up, False)
            rows_launch(x, w.mT, ends, rows, None, 1, order, bias[:, :1].expand(32, k), gate, order, *up[2:], True)
            # backward of the last: the gradient of the output, wᵀ, gates and the dots with x
            slope = (order, 8, None, None, gate, order, x, None, 1, torch.zeros(32, k, dtype=dtype))
            rows_launch(tokens, w, ends, rows, *slope, True)
            weights_launch(x, tokens, ends, None, 1, order, 8, gate, order, False, True)
            weights_launch(tokens, x, ends, order, 8, None, 1, None, None, True, False)


@family("sparse.kernels", "_topology_kernel", "_sdd_kernel", "_spmm_kernel")
def sparse() -> None:
    from megablocks.ops.sparse import kernels
    from megablocks.ops.sparse.topology import topology_launch

    for experts, per_row in ((8, 4), (128, 32), (512, 3)):
        topology_launch(ints(experts + 1), per_row, 64, 128)
    for dtype, size in product((torch.bfloat16, torch.float32), (64, 128, 256)):
        a, data = torch.zeros(size, 256, dtype=dtype), torch.zeros(1, size, size, dtype=dtype)
        for x, y in ((a, a.t()), (a.t().contiguous().t(), a.t().contiguous())):
            kernels.sdd(x, y, ints(1), ints(1), ints(2), size)
        for epilogue in epilogues(data) if size == 128 else ():
            kernels.sdd(a, a.t(), ints(1), ints(1), ints(2), size, epilogue)
        for left, order, d in product((True, False), (None, ints(1)), (a, a.t().contiguous().t())):
            kernels.spmm(data, d if left else d.t(), ints(1, 4), ints(1), order, left)


@family("sparse.hopper_kernels", "sdd_kernel", "spmm_kernel", architectures=(90,))
def sparse_hopper() -> None:
    from megablocks.ops.sparse import hopper

    data = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    for k in (256, 1024):  # either tile of choose_sdd
        a = torch.zeros(128, k, dtype=torch.bfloat16)
        b = torch.zeros(k, 256, dtype=torch.bfloat16)
        for x, y in product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
            hopper.sdd(x, y, ints(2), ints(2), ints(2), 2)
        for epilogue in epilogues(data) if k == 256 else epilogues(data)[4:6]:
            hopper.sdd(a, b, ints(2), ints(2), ints(2), 2, epilogue)
    for left, order, d in product((True, False), (None, ints(2)), (a, a.t().contiguous().t())):
        for columns in (0, hopper.MANY_COLUMNS):
            tile = hopper.choose_spmm(columns, left, order is not None)
            hopper.spmm(data, d if left else d.t(), ints(1, 4), ints(2), order, left, tile=tile)


def epilogues(data: Tensor) -> list:
    from megablocks.ops.activation import UNARY
    from megablocks.ops.sparse.epilogue import Epilogue

    bias = torch.zeros(256)
    forms = [Epilogue("activate", name, act=data) for name in UNARY]
    forms += [Epilogue("activate", "gelu", True, bias=bias, act=data), Epilogue("slope", "gelu", True, pre=data)]
    return forms + [Epilogue("slope", name, pre=data) for name in UNARY]


if __name__ == "__main__":
    from megablocks.testing.compile_only import compiling_for

    architecture = int(sys.argv[1])
    with compiling_for(architecture) as compiled:
        for name, one in FAMILIES.items():
            if architecture in one.architectures and name in (sys.argv[2:] or FAMILIES):
                one.compile()
    shared = {kernel: max(b.metadata.shared for b in built) for kernel, built in compiled.items()}
    fused = {kernel: sum(fused_across_lanes(b.asm["ptx"]) for b in built) for kernel, built in compiled.items()}
    print(json.dumps({kernel: [shared[kernel], len(built), fused[kernel]] for kernel, built in compiled.items()}))
