"""Bounds of a step compared with hand counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megablocks.config import ConfigError
from megablocks.monitor.bounds import FORMULAS, RunSizes, bounds
from megablocks.monitor.flops import GPTShape, peak_bandwidth
from megablocks.monitor.parts import PARTS

SMALL = RunSizes(  # dMoE-Small on one H200: 128 sequences in 4 micro-batches
    shape=GPTShape(
        num_layers=12, hidden_size=768, seq_length=1024, vocab_size=32768, num_attention_heads=12, head_dim=64,
        ffn_hidden_size=3072, num_moe_layers=12, num_experts=64, top_k=1, moe_ffn_hidden_size=3072,
    ),
    tokens=131072, micro_batches=4, parameters=3_680_000_000, expert_parameters=12 * 64 * 2 * 768 * 3072,
    device="NVIDIA H200",
)  # fmt: skip


def test_work_of_dmoe_small_by_hand() -> None:
    tokens, hidden, weights = 131072, 768, 12 * 64 * 2 * 768 * 3072
    small = dataclasses.replace(SMALL, dropout=True)
    work = {part: formula(small) for part, formula in FORMULAS.items()}
    assert work["experts"].flops == 12 * 3 * 2 * 2 * tokens * hidden * 3072
    assert work["experts"].bytes == 4 * weights * 12 + 12 * tokens * 2 * 6 * (768 + 3072)
    assert work["attention"].flops == pytest.approx(12 * 3.5 * 2 * 2 * 128 * 1024**2 * hidden / 2)
    assert work["attention"].bytes == 12 * tokens * 2 * 12 * hidden
    assert work["dense products"].flops == 12 * 3 * 2 * tokens * 4 * hidden**2
    assert work["dense products"].bytes == 4 * 12 * 4 * hidden**2 * 12 + 12 * tokens * 2 * 3 * 6 * hidden
    assert work["embedding and loss"].flops == 3 * 2 * tokens * hidden * 32768
    assert work["routing"].flops == 12 * 3 * 2 * tokens * hidden * 64
    assert work["routing"].bytes == 4 * 12 * hidden * 64 * 12 + 12 * tokens * 2 * (6 * hidden + 12 * 64)
    assert work["norms"].bytes == (24 * 9 + 5) * tokens * hidden * 2
    assert work["elementwise"].bytes == 0
    assert work["optimizer"].bytes == 30 * 3_680_000_000
    assert work["gradients"].bytes == 8 * 3_680_000_000


def test_bounds_are_times_on_the_gpu() -> None:
    experts = bounds(SMALL)["experts"]
    assert experts.arithmetic == pytest.approx(1e3 * 12 * 12 * 131072 * 768 * 3072 / 989.4e12)
    assert experts.bytes == pytest.approx(1e3 * FORMULAS["experts"](SMALL).bytes / 4.8e12)
    assert experts.least == max(experts) and set(FORMULAS) <= set(PARTS)


def test_ranks_share_the_work_and_models_differ() -> None:
    two = dataclasses.replace(SMALL, world_size=2, optimizer_shards=2)
    assert FORMULAS["experts"](two).flops == FORMULAS["experts"](SMALL).flops / 2
    assert FORMULAS["optimizer"](two).bytes == FORMULAS["optimizer"](SMALL).bytes / 2
    spread = dataclasses.replace(two, expert_optimizer_shards=1)  # each rank has experts of its own
    experts = SMALL.expert_parameters
    assert FORMULAS["optimizer"](spread).bytes == 30 * ((3_680_000_000 - experts) / 2 + experts)
    shape = dataclasses.replace(SMALL.shape, num_moe_layers=0, gated=True, num_query_groups=4)
    dense = dataclasses.replace(SMALL, shape=shape, expert_parameters=0, rotary=True, qk_norms=True)
    tokens, matrices = 131072, 2 * 768**2 + 2 * 768 * 256 + 3 * 768 * 3072
    assert FORMULAS["dense products"](dense).flops == 12 * 6 * tokens * matrices
    assert FORMULAS["norms"](dense).bytes == tokens * (24 * 8 * 768 + 5 * 768 + 5 * 12 * (768 + 256)) * 2
    rows = 3 * (4 * 768 + 2 * 256 + 2 * 768 + 3 * 3072)
    assert FORMULAS["dense products"](dense).bytes == 12 * (4 * matrices * 12 + tokens * 2 * rows)
    assert FORMULAS["elementwise"](dense).bytes == 12 * tokens * 2 * (8 * 3072 + 4 * (768 + 256))
    assert FORMULAS["experts"](dense) == FORMULAS["routing"](dense) == (0, 0)
    assert set(FORMULAS) - set(bounds(dense)) == {"experts", "routing"}


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"device": "NVIDIA GH200 480GB"}, {"element_bytes": 4}])
def test_no_bound_is_better_than_a_wrong_one(change: dict) -> None:
    assert bounds(dataclasses.replace(SMALL, **change)) == {}


@pytest.mark.parametrize(
    "name, rate",
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 2.04e12),
        ("NVIDIA A100 80GB PCIe", 1.94e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Tesla", None),
    ],
)
def test_bandwidth_by_name_or_none(name: str, rate: float | None) -> None:
    assert peak_bandwidth(name) == rate


def test_run_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(SMALL.to_json())
    assert RunSizes.read(path) == SMALL
    for text in ("{", "[]", "[" * 100_000, '{"tokens": 3}', SMALL.to_json().replace('"tokens"', '"token"')):
        path.write_text(text)
        with pytest.raises(ConfigError, match="run.json: must be a run.json of the driver, with shape, tokens, "):
            RunSizes.read(path)
