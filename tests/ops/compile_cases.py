"""What to compile for each architecture: every kernel of the package, launched as the ops launch it.

    python tests/ops/compile_cases.py ARCHITECTURE [--few] [FAMILY…]

prints one line of JSON: kernel → [most shared bytes, binaries, products fused across lanes, waits without acquire].

A family is a function below that calls launchers with tensors on the CPU (see megablocks.testing.compile_only) and
names its kernels. A new kernel is put into a family; test_compile.py fails while one is missing. --few compiles the
first four binaries of each kernel, with two activations in place of all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megablocks.ops.routing.dispatch import Dispatch
    from megablocks.ops.routing.topk import RouterOptions
    from megablocks.ops.sparse.matrix import Blocks


def fused_across_lanes(ptx: str) -> int:
    """Multiply-adds onto what a shuffle brought: each lane fuses its own product with another's rounded one.

    The lanes of such a sum hold different last bits: a race where all of them store it in one place, a disagreement
    where each decides by it.
    """
    shuffled = set(re.findall(r"shfl\.sync\.\w+\.b32\s+(%\w+)", ptx))
    moved = dict(re.findall(r"mov\.b32\s+(%\w+), (%\w+);", ptx))
    addends = re.findall(r"fma\.rn(?:\.ftz)?\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx)
    return sum(moved.get(a, a) in shuffled for a in addends)


def waits_without_acquire(ptx: str) -> bool:
    """Whether a kernel polls memory that others write, and reads what they wrote without an acquire."""
    return "ld.volatile" in ptx and ".acquire." not in ptx


STORES_TWICE = "megablocks.ops.routing.topk_triton._weight_backward_kernel"


def stores_in_two_steps(ptx: str) -> bool:
    """Whether a barrier stands between the first and the last store to global memory."""
    return re.search(r"st\.global.*bar\.sync.*st\.global", ptx, re.DOTALL) is not None


def machine_code(kernel: Any) -> str:
    from triton.knobs import nvidia

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def conditional_reductions(code: str) -> int:
    """Reductions over a warp that ptxas put under a predicate. CUDA 12.8 took the predicate of another value once."""
    found = re.findall(r"(@!?U?P\d+\s+)?\w*REDUX\b", code)
    assert found, "no reduction over a warp, although there is one in the PTX"
    return sum(map(bool, found))


EVERY = (torch.bfloat16, torch.float16, torch.float32)
ARCHITECTURES = (80, 86, 90, 100, 120)
TILED = ((256, 128), (1024, 512), (4096, 1024))
"""(k, n) of products that reach each tile of choose_m."""


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

    for experts in (8, 128, 512):
        dispatch_launch(ints(4096), ints(4096), 512, experts)


@family("routing.rounding_triton", "_odds_kernel", "_loads_kernel", "_select_kernel", "_count_kernel", "_place_kernel")
def rounding() -> None:
    from megablocks.ops.routing.rounding import ROUNDINGS, STOCHASTIC
    from megablocks.ops.routing.rounding_triton import flags_launch, place_launch, round_launch

    for experts in (8, 128, 600):
        flags, ends = flags_launch(ints(experts, 512), ints(experts).long())
        place_launch(flags, ends, 2000, torch.zeros(512, experts))
        for rule in ROUNDINGS:
            draw = torch.zeros(experts) if rule in STOCHASTIC else None
            round_launch(ints(experts, 512), ints(experts).long(), ints(3).long(), draw, rule, 128)


@family("permute.permute_triton", "_expand_kernel", "_combine_kernel", "_combine_backward_kernel")
def permute() -> None:
    from megablocks.ops.permute.permute_triton import combine_backward_launch, combine_launch, expand_launch
    from megablocks.ops.routing.dispatch import Dispatch

    d = Dispatch(ints(5), ints(9), ints(32), ints(32), ints(32))
    for dtype, hidden in product(EVERY, (512, 1536, 8192)):
        x, weight = torch.zeros(8, hidden, dtype=dtype), torch.zeros(32)
        expanded = expand_launch(x, d)
        expand_launch(x, d._replace(padded=True))
        for w in (weight, None):
            combine_launch(expanded, w, d)
        for kept, padded in product((expanded, None), (False, True)):
            combine_backward_launch(x, kept, weight, d._replace(padded=padded))


def router_cases() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, RouterOptions]]:
    """Logits, bias, padding mask and options."""
    from megablocks.ops.routing.topk import RouterOptions

    for dtype, (experts, k) in product((torch.bfloat16, torch.float32), ((8, 1), (128, 8), (130, 8), (1000, 32))):
        logits, bias = torch.zeros(64, experts, dtype=dtype), torch.zeros(experts)
        yield logits, None, None, RouterOptions(k, False, False, 0, 1.0, 0.1, 0.1)
        yield logits, bias, torch.zeros(64, dtype=torch.bool), RouterOptions(k, True, False, 2, 2.5, 0.1, 0.1)
        yield logits, bias, None, RouterOptions(k, False, True, 1, 1.0, 0.0, 0.0)


@family("routing.topk_triton", "_route_kernel", "_finish_kernel", "_route_backward_kernel")
def router() -> None:
    from megablocks.ops.routing import topk_triton
    from megablocks.ops.routing.topk import RouterGradients, RouterSaved, empty_output

    for logits, bias, mask, options in router_cases():
        topk_triton.route_launch(logits, bias, mask, options)
        every = (torch.zeros(logits.shape), ints(*logits.t().shape))
        topk_triton.score_launch(logits, bias, mask, empty_output(logits, 0), every, options)
        (tokens, experts), one = logits.shape, torch.ones(())
        pairs, counts = tokens * options.top_k, (ints(experts).long(), ints(3).long())
        grads = RouterGradients(torch.zeros(pairs), one, one, torch.ones(experts))
        flags = torch.zeros(experts, tokens, dtype=torch.int8)
        for saved in (RouterSaved(ints(pairs), *counts), RouterSaved(None, *counts, flags, ints(tokens))):
            topk_triton.route_backward_launch(logits, mask, saved, grads, options)


@family("routing.topk_triton", "_weight_backward_kernel")
def router_weights() -> None:
    from megablocks.ops.routing.topk_triton import weight_backward_launch

    for logits, _, _, options in router_cases():
        if options.after:
            weight, experts = torch.zeros(logits.shape[0] * options.top_k), logits.shape[1]
            weight_backward_launch(weight, ints(weight.numel()), weight, experts, logits.dtype, options)


@family("permute.padded_triton", "_pad_kernel")
def padded() -> None:
    from megablocks.ops.permute.padded_triton import pad_launch

    for experts in (8, 128, 512):
        d = dispatch_of(16, 32, experts)
        pad_launch(d, ints(experts), 0, 64)
        pad_launch(d, None, 4, 4 * experts)


@family("activation_triton", "_forward_kernel", "_backward_kernel", "_clamped_kernel", "_clamped_backward_kernel")
def activation() -> None:
    from megablocks.ops import activation_triton
    from megablocks.ops.activation_table import ACTIVATIONS, APPROXIMATIONS, Activation
    from megablocks.ops.activation_triton import activation_backward_launch, activation_launch
    from megablocks.ops.clamp import Clamp

    for dtype, *form in product(EVERY, ACTIVATIONS, APPROXIMATIONS):
        z, one = torch.zeros(64, dtype=dtype), Activation(*form)
        gate = z if one.gated else None
        activation_launch(z, gate, one)
        activation_backward_launch(z, z, gate, one)
        if one.gated:
            h = torch.zeros(8, 128, dtype=dtype)
            activation_launch(h, None, one)
            activation_backward_launch(z.view(1, 64).expand(8, 64), h, None, one)
    for dtype, width, interleaved in product(EVERY, (20, 1024), (False, True)):
        h, clamp = torch.zeros(8, 2 * width, dtype=dtype), Clamp(7.0, 1.702, 1.0, interleaved)
        activation_triton.clamped_gate_launch(h, clamp)
        activation_triton.clamped_gate_backward_launch(h[:, :width], h, clamp)


@family("loss_triton", "_sums_kernel", "_gradient_kernel")
def linear_cross_entropy() -> None:
    from megablocks.ops.loss_triton import gradient_launch, sums_launch

    for dtype, words in product(EVERY, (101, 32768)):
        logits, labels = torch.zeros(8, words, dtype=dtype), torch.zeros(8, dtype=torch.int64)
        maximum, total, grad = sums_launch(logits, labels)
        gradient_launch(logits, labels, maximum, total, grad)
        gradient_launch(logits, labels, maximum, total, grad[:1].expand(8))


@family("adam_triton", "_adam_kernel", "_square_sum_kernel")
def adam() -> None:
    from megablocks.ops import adam_triton
    from megablocks.ops.adam import Item, Tables

    for aligned in (True, False):
        one = Tables().of([Item(aligned, (16, 0))], torch.device("cpu"))
        adam_triton.square_sum_launch(one, torch.device("cpu"))
        for dtype in adam_triton.COPIES:
            tables = [table._replace(kind=(dtype, aligned)) for table in one]
            adam_triton.adam_launch(tables, torch.zeros(1, 8), torch.ones(()))


@family("norm_triton", "_norm_kernel", "_norm_backward_kernel", "_add_partials_kernel")
def norm() -> None:
    from megablocks.ops.add_norm import AddNormOptions
    from megablocks.ops.norm_triton import add_norm_backward_launch, add_norm_launch, add_partials_launch

    for programs, count, width in product((1, 396), (1, 2, 3), (13, 768)):
        add_partials_launch(torch.zeros(programs, count, width))
    for dtype, hidden, centered in product(EVERY, (13, 64, 768, 4096, 16384), (False, True)):
        x, weight = torch.zeros(40, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
        alone, bias = AddNormOptions(0, 1e-5, 1.0), weight if centered else None
        _, _, mean, rstd, _ = add_norm_launch(x, None, None, None, weight, bias, alone)
        add_norm_backward_launch(None, x, x, None, weight, mean if centered else None, rstd, False, alone)
        seed, options = torch.zeros((), dtype=torch.int64) if hidden < 4096 else None, AddNormOptions(6554, 1e-5, 0.0)
        x_bias, bias = (weight, None) if centered else (None, weight)
        *_, mask = add_norm_launch(x, x_bias, x, seed, weight, bias, options)
        add_norm_backward_launch(x, x, x, mask, weight, None if centered else mean, rstd, centered, options)


@family("grouped.pair_mm_triton", "_pair_mm_kernel")
def pair_mm() -> None:
    from megablocks.ops.activation_table import ACTIVATIONS, Activation
    from megablocks.ops.grouped.pair_mm_triton import pair_mlp_launch, pair_mm_launch

    for dtype, pairs, (inner, outer), first in product(EVERY, (8, 512), ((2048, 1536), (13, 5)), (False, True)):
        x, ids = torch.zeros(pairs // 4, inner, dtype=dtype), ints(pairs).long()
        w = torch.zeros(8, inner, outer, dtype=dtype)
        w = w.transpose(1, 2).contiguous().transpose(1, 2) if first else w
        pair_mm_launch(x, w, ids, None, None)
        pair_mm_launch(x, w, ids, torch.zeros(8, outer, dtype=dtype), torch.zeros(pairs))
    cases = *product(EVERY, (1, 64), ACTIVATIONS[:1], (False,)), *product(EVERY[:1], (1,), ACTIVATIONS, (True,))
    for dtype, tokens, name, biased in cases:
        activation = Activation(name)
        up = torch.zeros(8, 768 * (1 + activation.gated), 2048, dtype=dtype).mT
        down = torch.zeros(8, 2048, 768, dtype=dtype).mT
        biases = [torch.zeros(8, w.shape[2], dtype=dtype) if biased else None for w in (up, down)]
        x, ids, weight = torch.zeros(tokens, 2048, dtype=dtype), ints(tokens, 8).long(), torch.zeros(tokens, 8)
        pair_mlp_launch(x, ids, weight, up, down, *biases, activation)


@family("rope_triton", "_rope_kernel")
def rope() -> None:
    from megablocks.ops.rope_triton import rope_launch

    for dtype, (size, rotated), *options in product(EVERY, ((64, 64), (96, 40)), (False, True), (False, True)):
        interleaved, transposed = options
        x = torch.zeros(4, 2, 12, 3 * size, dtype=dtype)[..., :size]
        rope_launch(x, torch.zeros(4, rotated), interleaved, 1.0, transposed)


@family("exchange_triton", "to_experts_kernel", "to_home_kernel", "limit_kernel")
def exchange() -> None:
    from megablocks.ops.exchange import Exchange, Layout

    for (dtype, hidden), ranks in product([(torch.bfloat16, 768), (torch.float32, 520)], (2, 8)):
        layout = Layout(ranks, 64, hidden, 8, dtype)
        one = Exchange(layout, 0, [256] * ranks, torch.device("cpu"), 16, max_rows=768)
        x, ids, weight = torch.zeros(64, hidden, dtype=dtype), ints(64, 8), torch.zeros(64, 8)
        rows, local, values = one.to_experts(x, ids, weight)
        one.to_experts(x, ids, None, local)
        d = one.dispatch(local)
        for values_home, how in product((None, values), ((), (d,), (d, values))):
            one.to_home(rows, local, ids, values_home, *how)


@family("quant.quant_triton", "_quantize_kernel", "_dequantize_kernel")
def quant() -> None:
    from megablocks.ops.quant.quant_triton import dequantize_launch, quantize_launch

    for dtype, width, num_bits in product(EVERY, (20, 1024), (8, 4)):
        codes, scales = quantize_launch(torch.zeros(8, width, dtype=dtype), num_bits)
        dequantize_launch(codes, scales, num_bits, width, dtype)


@family("grouped.grouped_mm_hopper", "ragged_m_kernel", architectures=(90,))
def grouped_hopper() -> None:
    from megablocks.ops.grouped.grouped_mm_hopper import ragged_m

    rows = 1024
    for (k, n), transposed in product(TILED, (False, True)):
        x, w = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(16, k, n, dtype=torch.bfloat16)
        w = w.mT.contiguous().mT if transposed else w
        for gather in (None, ints(rows)):
            ragged_m(x, w, ints(17), gather)
        ragged_m(x, w, ints(17), bias=torch.zeros(16, n, dtype=torch.bfloat16))
        ragged_m(x, w, ints(17), x2=x, v=w)
    # low_rank_mm's: of rank 16, in forward and in backward
    for transposed in (False, True):
        v, w, t = (torch.zeros(s, dtype=torch.bfloat16) for s in ((16, 16, 128), (16, 1024, 128), (rows, 16)))
        v, w = (m.mT.contiguous().mT if transposed else m for m in (v, w))
        ragged_m(torch.zeros(rows, 1024, dtype=torch.bfloat16), w, ints(17), x2=t, v=v)


@family("grouped.grouped_mm_hopper_dw", "ragged_k_kernel", architectures=(90,))
def grouped_hopper_dw() -> None:
    from megablocks.ops.grouped.grouped_mm_hopper_dw import ragged_k

    for m, n in ((64, 128), (512, 128), (512, 512)):  # each tile of choose_k
        a, b = torch.zeros(1024, m, dtype=torch.bfloat16), torch.zeros(1024, n, dtype=torch.bfloat16)
        for gather in (None, ints(1024)):
            ragged_k(a, b, ints(17), gather)
            ragged_k(a, b, ints(17), gather, add_to=torch.zeros(16, m, n))


@family("grouped.pieces_triton", "list_pieces_kernel", "add_pieces_kernel", architectures=(90,))
def pieces() -> None:
    from megablocks.ops.grouped.pieces_triton import add_launch, list_launch

    for experts in (8, 128, 512):
        items = list_launch(ints(experts + 1), 512, 64)
        for o in (torch.zeros(experts, 64, 128, dtype=torch.bfloat16), torch.zeros(experts, 64, 128)):
            add_launch(torch.zeros(64, 64, 128), items, experts + 64, o, o.dtype == torch.float32, 528)


@family("grouped.bias_triton", "_add_bias_kernel", "_expert_sum_kernel", "_expert_dot_kernel")
def bias() -> None:
    from megablocks.ops.grouped import bias_triton

    for dtype, experts, width in product(EVERY, (8, 512), (20, 1024)):
        rows, d = torch.zeros(64, width, dtype=dtype), dispatch_of(64, 128, experts)
        values = torch.zeros(experts, width, dtype=dtype)
        bias_triton.add_expert_bias_launch(rows, values, ints(experts + 1))
        bias_triton.expert_sum_launch(rows, ints(experts + 1))
        bias_triton.expert_sum_launch(rows, d.expert_offsets, torch.zeros(128), d.gather, d.pair)
        bias_triton.output_bias_dot_launch(rows, values, d)


def dispatch_of(tokens: int, rows: int, experts: int) -> Dispatch:
    from megablocks.ops.routing.dispatch import Dispatch

    return Dispatch(ints(experts + 1), ints(tokens + 1), ints(rows), ints(rows), ints(rows))


@family("fused.gradient_triton", "_mlp_gradient_kernel")
def fused_gradient() -> None:
    from megablocks.ops.activation_table import ACTIVATIONS, Activation
    from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

    for dtype, width, name in product(EVERY, (20, 256, 4096), ACTIVATIONS):
        z, activation = torch.zeros(8, width, dtype=dtype), Activation(name)
        mlp_gradient_launch(z, z, z if activation.gated else None, torch.zeros(8), dispatch_of(4, 8, 4), activation)


@family("fused.gradient_hopper", "down_gradient_kernel", architectures=(90,))
def fused_gradient_hopper() -> None:
    from megablocks.ops.activation_table import ACTIVATIONS, Activation
    from megablocks.ops.fused.gradient_hopper import down_gradient

    rows = 256
    for name in ACTIVATIONS:
        dy, w2 = torch.zeros(64, 200, dtype=torch.bfloat16), torch.zeros(16, 96, 200, dtype=torch.bfloat16)
        z, activation = torch.zeros(rows, 96, dtype=torch.bfloat16), Activation(name, "none")
        gate = z if activation.gated else None
        down_gradient(dy, w2, z, gate, torch.zeros(rows), dispatch_of(64, rows, 16), activation)


@family("fused.up_hopper", "up_kernel", architectures=(90,))
def fused_up() -> None:
    from megablocks.ops.activation_table import ACTIVATIONS, Activation
    from megablocks.ops.fused.up_hopper import up

    d = dispatch_of(64, 256, 16)
    for name in ACTIVATIONS:
        x, w = torch.zeros(64, 200, dtype=torch.bfloat16), torch.zeros(16, 96, 200, dtype=torch.bfloat16)
        v = w if Activation(name).gated else None
        bias = torch.zeros(16, 96, dtype=torch.bfloat16)
        up(x, w, v, None, None, d, Activation(name))
        up(x, w, v, bias, None if v is None else bias, d, Activation(name, "none"))


@family("grouped.grouped_mm_triton", "_rows_kernel", "_weights_kernel")
def scattered() -> None:
    from megablocks.ops.grouped.grouped_mm_triton import ragged_k, ragged_m, scattered_mm_dw_launch, scattered_mm_launch
    from megablocks.ops.routing.dispatch import Rows

    for dtype in (torch.bfloat16, torch.float32):
        x, offsets = torch.zeros(1024, 256, dtype=dtype), ints(33)
        for n, gather in product((64, 128, 512), (None, ints(1024))):
            w, b = torch.zeros(32, 256, n, dtype=dtype), torch.zeros(1024, n, dtype=dtype)
            ragged_m(x, w, offsets, gather)
            ragged_m(x, w.mT.contiguous().mT, offsets, gather)
            ragged_k(x, b, offsets, gather)
            ragged_k(x, b, offsets, gather, add_to=torch.zeros(32, 256, n))

    rows = 4096
    for dtype in (torch.bfloat16, torch.float32):
        order, weight = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        ends = torch.zeros(32, dtype=torch.int64)
        up, down = Rows(ends, in_index=order, in_fan=8), Rows(ends, out_index=order, pair=order)
        for n, k in ((64, 256), (128, 256), (512, 256), (65, 73)):  # one element a thread where rows are odd
            x, tokens = torch.zeros(rows, n, dtype=dtype), torch.zeros(rows // 8, k, dtype=dtype)
            w, bias = torch.zeros(32, n, k, dtype=dtype).mT, torch.zeros(32, n, dtype=dtype)
            none = None, None, None
            scattered_mm_launch(tokens, w, None, *none, up, True)
            scattered_mm_launch(tokens, w, bias, *none, Rows(ends.int(), in_index=order.int()), False)
            scattered_mm_launch(x, w.mT, bias[:, :1].expand(32, k), weight, None, None, down, True)
            # backward of the last: the gradient of the output, wᵀ, weights and the dots with x
            dot_bias = torch.zeros(32, k, dtype=dtype)
            scattered_mm_launch(tokens, w, None, weight, x, dot_bias, up._replace(pair=order), True)
            scattered_mm_dw_launch(x, tokens, weight, down._replace(out_fan=8), False, True)
            scattered_mm_dw_launch(tokens, x, None, up, True, False)


@family("sparse.kernels", "_topology_kernel", "_sdd_kernel", "_spmm_kernel")
def sparse() -> None:
    from megablocks.ops.sparse import kernels

    for experts, per_row in ((8, 4), (128, 32), (512, 3)):
        kernels.topology_launch(ints(experts + 1), per_row, 64, 128)
    for dtype, size in product((torch.bfloat16, torch.float32), (64, 128, 256)):
        a, data = torch.zeros(size, 256, dtype=dtype), torch.zeros(1, size, size, dtype=dtype)
        for x, y in ((a, a.t()), (a.t().contiguous().t(), a.t().contiguous())):
            kernels.sdd(x, y, blocks(1, size))
        for epilogue in epilogues(data) if size == 128 else ():
            kernels.sdd(a, a.t(), blocks(1, size), epilogue)
        for left, order, d in product((True, False), (None, ints(1)), (a, a.t().contiguous().t())):
            kernels.spmm(data, d if left else d.t(), ints(1, 4), ints(1), order, left)


@family("sparse.products_hopper", "sdd_kernel", "spmm_kernel", architectures=(90,))
def sparse_hopper() -> None:
    from megablocks.ops.sparse import products_hopper as hopper

    data = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    for k in (256, 1024):  # either tile of choose_sdd
        a = torch.zeros(128, k, dtype=torch.bfloat16)
        b = torch.zeros(k, 256, dtype=torch.bfloat16)
        for x, y in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
            hopper.sdd(x, y, blocks(2, 128, run=2))
        for epilogue in epilogues(data) if k == 256 else epilogues(data)[:2]:
            hopper.sdd(a, b, blocks(2, 128, run=2), epilogue)
    turned = a.t().contiguous().t()  # each pair of the three choices once
    for left, order, d in ((True, None, a), (True, ints(2), turned), (False, None, turned), (False, ints(2), a)):
        hopper.spmm(data, d if left else d.t(), ints(1, 4), ints(2), order, left)


def blocks(n: int, size: int, run: int = 1) -> Blocks:
    """One block row of n blocks."""
    from megablocks.ops.sparse.matrix import Blocks

    return Blocks(ints(n), ints(n), ints(2), ints(n), ints(n + 1), ints(n), ints(1, 4), ints(n, 4), size, run)


def epilogues(data: Tensor) -> list:
    from megablocks.ops.activation_table import UNARY, Activation
    from megablocks.ops.sparse.products import Epilogue

    exact = Activation("gelu", "none")
    forms = [Epilogue(exact, torch.zeros(256), data), Epilogue(exact, pre=data)]
    forms += [Epilogue(Activation(name), act=data) for name in UNARY]
    return forms + [Epilogue(Activation(name), pre=data) for name in UNARY]


if __name__ == "__main__":
    from megablocks.testing.compile_only import compiling_for

    architecture, names, most = int(sys.argv[1]), sys.argv[2:], sys.maxsize
    if "--few" in names:
        from megablocks.ops import activation_table

        names.remove("--few")
        activation_table.ACTIVATIONS, most = ("gelu", "swiglu"), 4
    with compiling_for(architecture, most) as compiled:
        for name, one in FAMILIES.items():
            if architecture in one.architectures and name in (names or FAMILIES):
                one.compile()
    shared = {kernel: max(b.metadata.shared for b in built) for kernel, built in compiled.items()}
    fused = {kernel: sum(fused_across_lanes(b.asm["ptx"]) for b in built) for kernel, built in compiled.items()}
    waits = {kernel: sum(waits_without_acquire(b.asm["ptx"]) for b in built) for kernel, built in compiled.items()}
    for kernel, built in compiled.items():
        codes = (machine_code(one) for one in built if "redux.sync" in one.asm["ptx"])
        if found := sum(map(conditional_reductions, codes)):
            sys.exit(f"{kernel}: {found} sums or maxima over a warp are conditional: take them outside of a short `if`")
    if not all(stores_in_two_steps(one.asm["ptx"]) for one in compiled.get(STORES_TWICE, ())):
        sys.exit(f"{STORES_TWICE}: no barrier between the zeros and the gradients that replace some of them")
    print(json.dumps({name: [shared[name], len(built), fused[name], waits[name]] for name, built in compiled.items()}))
