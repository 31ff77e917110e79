"""The kernels of fp8.py, interpreted, compute what they say; those for Hopper compile; the gain counts the weights."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.testing.poison import poisoned_empty

from .conftest import BENCHMARKS

kernels = importlib.import_module("fp8_kernels")
fp8 = importlib.import_module("fp8")

T, H, WIDTH, E, K = 70, 256, 128, 3, 2
CAST = 0.1
"""Bound on the error of a cast: 0.05 to 0.08 here, as Triton's interpreter rounds to e4m3 without the carry."""


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm())


def rows_of(q: "kernels.Quantized") -> Tensor:
    return q.values.double() * q.scales.double().repeat_interleave(128, 1)


def weights_of(q: "kernels.Quantized") -> Tensor:
    return q.values.double() * q.scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def test_weights_are_quantized_both_ways_round() -> None:
    w, v = torch.randn(E, WIDTH, H).bfloat16(), torch.randn(E, WIDTH, H).bfloat16()
    q, qt = kernels.quantize_weights(w, v)
    assert error(weights_of(q), torch.cat([w, v], 1)) < CAST
    assert torch.equal(weights_of(qt), weights_of(q).mT)


def test_a_product_of_gathered_rows() -> None:
    ids = torch.tensor([0, 2]).repeat(T, 1)  # expert 1 has no rows
    ids[:20] = 0  # the same id twice counts twice
    d = build_dispatch(make_routing(ids, torch.rand(T, K), E))
    x = torch.randn(T, H).bfloat16()
    a, (b, _) = kernels.quantize_rows(x), kernels.quantize_weights(torch.randn(E, WIDTH, H).bfloat16())
    assert error(rows_of(a), x) < CAST
    with poisoned_empty():
        y = kernels.rows_product_ref(a, b, d.expert_offsets, d.gather)
    rows, ends = rows_of(a)[d.gather.long()], d.expert_offsets.tolist()
    want = [rows[ends[e] : ends[e + 1]] @ w.T for e, w in enumerate(weights_of(b))]
    assert error(y, torch.cat(want)) < 5e-3


def test_the_backward_pass() -> None:
    z, d_act = torch.randn(T * K, 2 * WIDTH).bfloat16(), torch.randn(T * K, WIDTH).bfloat16()
    weight, pair = torch.rand(T * K), torch.randperm(T * K, dtype=torch.int32)
    pre, gate = (half.double().requires_grad_() for half in z.chunk(2, 1))
    act = torch.nn.functional.silu(pre) * gate
    assert error(rows_of(kernels.quantize_rows(z, gated=True)), act) < CAST
    scale = weight[pair.long()].unsqueeze(1).double()
    want = torch.cat(torch.autograd.grad(act, (pre, gate), d_act.double() * scale), 1)
    dots = torch.zeros_like(weight, dtype=torch.float64)
    dots[pair.long()] = (d_act.double() * act.detach()).sum(1)
    with poisoned_empty():
        dz8, dz, scaled, d_weight = kernels.swiglu_backward(d_act, z, weight, pair)
    assert error(d_weight, dots) < 1e-5
    assert max(error(dz, want), error(scaled, act * scale)) < 5e-3
    assert error(rows_of(dz8), want) < CAST


COMPILE = """
import torch
import fp8_hopper
from fp8_kernels import FP8, Quantized
from megablocks.testing.compile_only import SHARED_BYTES, compiling_for

def operand(scales, *shape):
    return Quantized(torch.empty(*shape, dtype=FP8), torch.empty(scales))

with compiling_for(90) as compiled:
    offsets, gather = torch.zeros(5, dtype=torch.int32), torch.zeros(300, dtype=torch.int32)
    a, b = operand((300, 4), 300, 512), operand((4, 2, 4), 4, 256, 512)
    fp8_hopper.rows_product(a, b, offsets)
    fp8_hopper.rows_product(a, b, offsets, gather)
(made,) = compiled.values()
assert len(made) == 2 and all(kernel.metadata.shared <= SHARED_BYTES[90] for kernel in made)
assert all("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel.asm["ptx"] for kernel in made)
"""


def test_the_kernels_for_hopper_compile(tmp_path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_gain_counts_the_weights_once_a_step() -> None:
    layers = {"bf16": [12e3, 24e3], "fp8 + bf16 dW": [8e3, 16e3], "quantize weights": [4e3, 8e3]}
    bounds = fp8.bounds("Q", "NVIDIA H100 80GB HBM3")
    record = {"shape": "Q", "layers": layers, "bounds": bounds, "errors": {"fp8 + bf16 dW": {"y": 0.06, "dx": 0.07}}}
    rows = fp8.gains(record)
    found = [(r["micro_batches"], round(r["gain"], 3), r["largest_error"]) for r in rows]
    assert found == [(1, 1.0, 0.07), (4, 1.333, 0.07)]
    assert 1 < rows[0]["gain_of_bound"] < rows[1]["gain_of_bound"] < 2


def test_bounds_are_those_of_the_card() -> None:
    sxm, pcie = (fp8.bounds("L", f"NVIDIA H100 {card}") for card in ("80GB HBM3", "PCIe"))
    assert sxm["bf16"] == pytest.approx(12.71, rel=1e-3) and sxm["quantize weights"] == pytest.approx(2.404, rel=1e-3)
    assert pcie["bf16"] > 1.3 * sxm["bf16"] and pcie["quantize weights"] == pytest.approx(2.404 * 3.35 / 2, rel=1e-3)
    for other in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""):
        assert fp8.bounds("Q", other) is None
