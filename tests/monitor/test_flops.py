"""Model FLOPs compared with hand counts; peak rates by device name."""

import dataclasses

import pytest

from megablocks.monitor.flops import GPTShape, forward_flops_per_token, mfu, peak_flops, training_flops_per_token

DENSE = GPTShape(
    num_layers=6, hidden_size=512, seq_length=1024, vocab_size=51200, num_attention_heads=8, head_dim=64,
    ffn_hidden_size=2048,
)  # fmt: skip


def test_dense_model_by_hand() -> None:
    parts = forward_flops_per_token(DENSE)
    assert parts["attention_projections"] == 6 * 2 * 4 * 512 * 512
    assert parts["attention"] == 6 * 2 * 2 * (1024 / 2) * 512  # scores and values, half of the keys on average
    assert parts["mlp"] == 6 * 2 * 2 * 512 * 2048
    assert parts["logits"] == 2 * 512 * 51200
    assert parts["router"] == parts["experts"] == parts["shared_experts"] == 0
    assert training_flops_per_token(DENSE) == 3 * sum(parts.values())


def test_only_the_top_k_experts_count() -> None:
    moe = dataclasses.replace(
        DENSE, num_moe_layers=6, num_experts=64, top_k=2, moe_ffn_hidden_size=1024, gated=True,
        shared_expert_hidden_size=256, num_query_groups=2,
    )  # fmt: skip
    parts = forward_flops_per_token(moe)
    assert parts["mlp"] == 0
    assert parts["router"] == 6 * 2 * 512 * 64
    assert parts["experts"] == 6 * 2 * 3 * 512 * 1024 * 2
    assert parts["shared_experts"] == 6 * 2 * 3 * 512 * 256
    assert parts["attention_projections"] == 6 * 2 * 512 * (2 * 512 + 2 * 2 * 64)
    more_experts = dataclasses.replace(moe, num_experts=128)
    difference = training_flops_per_token(more_experts) - training_flops_per_token(moe)
    assert difference == 3 * 6 * 2 * 512 * 64  # only the router grows


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peak_by_name_or_none(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_mfu_is_the_ratio_and_none_where_the_gpu_is_unknown() -> None:
    rate = 2 * 989.4e12 / training_flops_per_token(DENSE) / 4
    assert mfu(rate, DENSE, "NVIDIA H200", 2) == pytest.approx(0.25)
    assert mfu(rate, DENSE, "cpu", 2) is None
