"""The plug-in on one GPU: one rank with NCCL, the same tiny models as on the CPU."""

from __future__ import annotations

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Layout

from megablocks.testing.launcher import run_distributed_test

pytestmark = pytest.mark.gpu

SWIGLU = (("gated_linear_unit", True), ("activation_func", F.silu))
WIDE = (("hidden_size", 64), ("moe_ffn_hidden_size", 128), ("ffn_hidden_size", 128))
STEPS = 10
LAYOUTS = {
    "float32": Layout(layers=2),
    "float32, shared expert": Layout(layers=2, model=(("moe_shared_expert_intermediate_size", 32),)),
    "float32, biases": Layout(layers=2, model=(("add_bias_linear", True), ("bias_activation_fusion", False))),
    "float32, distributed optimizer, recompute": Layout(layers=2, distributed_optimizer=True, recompute="moe"),
    "float32, fused loss": Layout(layers=2, loss_kept_gib=0.0),
    "bf16": Layout(layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE)),
    "bf16, fused loss": Layout(layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), loss_kept_gib=1.0),
    "bf16, recomputed activation": Layout(
        layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), settings=(("recompute_activation", True),)
    ),
    "bf16, sparse": Layout(layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), settings=(("mlp_impl", "sparse"),)),
    "bf16, sparse in megatron's layer": Layout(
        layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), settings=(("mlp_impl", "sparse"), ("layer", "experts"))
    ),
    "float32, fused into main gradients": Layout(
        layers=2, settings=(("mlp_impl", "fused"), ("gradient_accumulation_fusion", True))
    ),
    "bf16, scatter": Layout(layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), settings=(("mlp_impl", "scatter"),)),
    "bf16, fused": Layout(
        layers=2,
        dtype="bfloat16",
        model=(*SWIGLU, *WIDE),
        settings=(("mlp_impl", "fused"), ("gradient_accumulation_fusion", False)),
    ),
    "bf16, fused into main gradients": Layout(
        layers=2,
        dtype="bfloat16",
        model=(*SWIGLU, *WIDE),
        settings=(("mlp_impl", "fused"), ("gradient_accumulation_fusion", True)),
    ),
    "bf16, capacity": Layout(layers=2, dtype="bfloat16", model=WIDE, settings=(("capacity_factor", 1.0),)),
    "bf16, expert choice": Layout(
        layers=2,
        dtype="bfloat16",
        model=(*WIDE, ("moe_aux_loss_coeff", 0.0)),
        settings=(("router_type", "expert_choice"),),
    ),
    "bf16, megatron's layer": Layout(
        layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE), settings=(("layer", "experts"),)
    ),
}
SPREAD = {
    "ep2": LAYOUTS["float32, shared expert"].but(ep=2),
    "ep2 overlapped": LAYOUTS["float32, shared expert"].but(ep=2, distributed_optimizer=True, overlap=True),
    "tp2 etp2": LAYOUTS["float32, shared expert"].but(tp=2, etp=2),
    "tp2 etp1 ep2": LAYOUTS["float32, shared expert"].but(tp=2, etp=1, ep=2),
    "pp2": LAYOUTS["float32, shared expert"].but(pp=2),
    "tp2 etp1 ep2, fused loss": LAYOUTS["float32, shared expert"].but(tp=2, etp=1, ep=2, loss_kept_gib=0.0),
    "pp2 overlapped, fused loss": LAYOUTS["float32, shared expert"].but(
        pp=2, distributed_optimizer=True, overlap=True, loss_kept_gib=1.0
    ),
}
"""Layouts of two GPUs. Each trains as the same model does on one GPU."""


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, harness.Trained]:
    layouts = [(name, layout, STEPS) for name, layout in LAYOUTS.items()]
    return run_distributed_test(harness.train_all, 1, layouts, backend="nccl")[0]


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, harness.Trained]:
    layouts = [(name, layout, STEPS) for name, layout in LAYOUTS.items() if layout.dtype == "float32"]
    return run_distributed_test(harness.train_all, 1, layouts)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_falls_on_a_gpu(on_gpu: dict[str, harness.Trained], name: str) -> None:
    losses = on_gpu[name].losses
    assert losses[-1] < losses[0] - 0.1
    assert all(0 < loss < 6 for loss in losses)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("float32")])
def test_gpu_trains_as_the_cpu_does(
    on_gpu: dict[str, harness.Trained], on_cpu: dict[str, harness.Trained], name: str
) -> None:
    gpu, cpu = on_gpu[name], on_cpu[name]
    assert gpu.losses[0] == pytest.approx(cpu.losses[0], rel=1e-5)
    error, tensor = harness.worst_difference(harness.assemble([gpu.grads]), harness.assemble([cpu.grads]))
    assert error <= 1e-4, f"gradient of {tensor}"
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "bf16, sparse",
        "bf16, sparse in megatron's layer",
        "bf16, scatter",
        "bf16, fused",
        "bf16, fused into main gradients",
    ],
)
def test_N6_other_experts_train_as_grouped_ones_on_a_gpu(on_gpu: dict[str, harness.Trained], name: str) -> None:
    assert on_gpu[name].losses == pytest.approx(on_gpu["bf16"].losses, rel=1e-2)


@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_S2_the_fused_loss_trains_as_megatrons_on_a_gpu(on_gpu: dict[str, harness.Trained], name: str) -> None:
    fused, plain = on_gpu[f"{name}, fused loss"], on_gpu[name]
    tolerance = 1e-4 if name == "float32" else 2e-2
    assert fused.losses == pytest.approx(plain.losses, rel=tolerance)
    error, tensor = harness.worst_difference(harness.assemble([fused.grads]), harness.assemble([plain.grads]))
    assert error <= tolerance, f"gradient of {tensor}"


def test_recomputed_activation_changes_nothing_on_a_gpu(on_gpu: dict[str, harness.Trained]) -> None:
    assert on_gpu["bf16, recomputed activation"].losses == pytest.approx(on_gpu["bf16"].losses, rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_N8_two_gpus_train_as_one(on_gpu: dict[str, harness.Trained]) -> None:
    layouts = [(name, layout, STEPS) for name, layout in SPREAD.items()]
    ranks = run_distributed_test(harness.train_all, 2, layouts, backend="nccl")
    one = on_gpu["float32, shared expert"]
    for name in SPREAD:
        grads = harness.assemble([rank[name].grads for rank in ranks], tolerance=1e-5)
        error, tensor = harness.worst_difference(grads, harness.assemble([one.grads]))
        assert error <= 1e-4, f"{name}: gradient of {tensor}"
        assert ranks[0][name].losses == pytest.approx(one.losses, rel=1e-3), name
