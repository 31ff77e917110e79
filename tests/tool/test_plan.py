"""`plan`: it stays within its error bars on every measured step, and a driver's flags mean the same as its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megablocks.config import ConfigError, MoEConfig
from megablocks.kinds import IMPLS
from megablocks.tool import memory, plan, step_time
from megablocks.tool.commands import main
from megablocks.tool.model import Model

ROOT = Path(__file__).parents[2]
MEASURED = {
    arm["arm"]: arm
    for arm in json.loads((ROOT / "benchmarks/results/h200/training_step.json").read_text())["summary"]["arms"]
    if not arm["arm"].endswith("-before")  # another commit, with other kernels
}
SMALL = Model(
    num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=32768, num_experts=64,
    micro_batch_size=128, global_batch_size=128, fused_loss_kept_gib=4.0,
)  # fmt: skip
DENSE = dataclasses.replace(SMALL, num_experts=0, num_moe_layers=0, micro_batch_size=64, add_bias_linear=True)
FINE = Model(
    num_layers=24, hidden_size=768, num_attention_heads=12, seq_length=4096, vocab_size=32768, num_experts=128,
    moe_router_topk=8, moe_ffn_hidden_size=256, micro_batch_size=8, global_batch_size=64, swiglu=True,
    normalization="RMSNorm", position_embedding_type="rope", hidden_dropout=0.0, fused_loss_kept_gib=4.0,
)  # fmt: skip
ROWS = {
    "dmoe-small-32": SMALL,
    "dmoe-small-64": SMALL,
    "dmoe-small": SMALL,
    "dense-small": DENSE,
    "dmoe-xs": Model(**{**dataclasses.asdict(SMALL), "num_layers": 6, "hidden_size": 512, "num_attention_heads": 8,
                        "kv_channels": None, "num_query_groups": None, "ffn_hidden_size": None,
                        "moe_ffn_hidden_size": None, "num_moe_layers": None}),
    "dmoe-fine": FINE,
}  # fmt: skip
SIZES = {"dmoe-small-32": 32, "dmoe-small-64": 64}
ROWS = {name: dataclasses.replace(m, micro_batch_size=SIZES.get(name, m.micro_batch_size)) for name, m in ROWS.items()}
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2".split()


def test_every_measured_step_has_a_row() -> None:
    assert set(ROWS) == set(MEASURED)


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_within_its_error_bar(name: str) -> None:
    found = memory.memory(ROWS[name])
    assert found.peak / memory.GIB == pytest.approx(MEASURED[name]["peak_gib"], rel=found.error_bar)
    assert found.error_bar == 0.10


@pytest.mark.parametrize("name", ROWS)
def test_time_is_within_its_error_bar(name: str) -> None:
    found = step_time.step_time(ROWS[name])
    assert found is not None and found.error_bar == 0.20
    assert found.milliseconds == pytest.approx(MEASURED[name]["ms"], rel=found.error_bar)
    assert found.tokens_per_second == pytest.approx(ROWS[name].tokens / found.milliseconds * 1e3)
    assert found.mfu == pytest.approx(MEASURED[name]["mfu"], rel=0.25)


def test_the_pages_table_is_what_is_planned_and_measured() -> None:
    rows = re.findall(r"(?m)^\| (.+) \| \d+ \| (.+), (.+) \| (\d+), (\d+) \|$", (ROOT / "docs/tool.md").read_text())
    assert len(rows) == len(ROWS)
    for (_, *said), (name, m) in zip(rows, ROWS.items(), strict=True):
        time, arm = step_time.step_time(m), MEASURED[name]
        assert time is not None
        found = memory.memory(m).peak / memory.GIB, arm["peak_gib"], time.milliseconds, arm["ms"]
        assert [f"{found[0]:.1f}", f"{found[1]:.1f}"] == said[:2], name
        assert list(map(float, said[2:])) == pytest.approx(found[2:], abs=0.6), name


def _driver_flags(script: str, flags: str, tmp_path: Path, world: int = 1) -> list[str]:
    """The driver's flags that a script of exp/ gives, without the data's folder."""
    environment = {**os.environ, "DRY_RUN": "1", "NGPU": str(world), "FLAGS": flags, "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "exp" / script), str(tmp_path / "run"), "100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout)
    words = words[words.index("megablocks.megatron.pretrain_gpt") + 1 :]
    place = words.index("--data-prefix")
    return [*words[:place], *words[place + 2 :], "--vocab-size", "32768"]


@pytest.mark.parametrize(
    ("name", "script", "flags"),
    [
        ("dmoe-small", "dmoe/dmoe_125m_8gpu.sh", "--global-batch-size 128 --micro-batch-size 128"),
        ("dmoe-xs", "dmoe/dmoe_46m_8gpu.sh", "--global-batch-size 128 --micro-batch-size 128"),
        ("dense-small", "gpt2/gpt2_125m_8gpu.sh", "--global-batch-size 128 --micro-batch-size 64"),
        ("dmoe-fine", "dmoe/dmoe_fine_1gpu.sh", "--global-batch-size 64 --micro-batch-size 8"),
    ],
)
def test_the_drivers_flags_mean_the_same(name: str, script: str, flags: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    before = dict(os.environ)
    found, _ = plan.model_of(["--", *_driver_flags(script, f"{flags} --megablocks-fused-loss-kept-gib 4", tmp_path)])
    assert os.environ == before
    assert plan.report(found)["memory"] == plan.report(ROWS[name])["memory"]
    assert plan.report(found)["step"] == plan.report(ROWS[name])["step"]


def test_a_layout_of_the_driver_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.training")
    flags = _driver_flags("dmoe/dmoe_125m_8gpu.sh", "--use-distributed-optimizer", tmp_path, 8)
    assert main(["plan", "--gpus", "8", "--json", "--", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["expert_model_parallel_size"] == 8 and found["model"]["use_distributed_optimizer"]
    assert found["mlp_impl"] == "fused" and found["model"]["global_batch_size"] == 512
    assert found["memory"]["error_bar"] == memory.ERROR_BAR_LAYOUT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (FLAGS[:-2], "--micro-batch-size is missing; give it, or a driver's command line behind --"),
        ([*FLAGS, "--tensor-model-parallel-size", "2"], "gpus=1: must be a multiple of TP · PP · CP = 2"),
        ([*FLAGS, "--num-experts", "3", "--moe-router-topk", "4"], "moe_router_topk=4: must be 1 to num_experts=3"),
        ([*FLAGS, "--mlp-impl", "reference"], "mlp_impl='reference': is for tests; nothing is known about its time"),
        ([*FLAGS, "--global-batch-size", "3"], "global_batch_size=3: must be a multiple of micro_batch_size=2 times"),
        (["--num-layers", "2", "--"], "--num-layers: give it behind --, with the driver's flags"),
        (["--", "--num-layer", "2"], "--num-layer: no such flag, did you mean --num-layers?"),
        (["--", *FLAGS, "--num-experts", "4", "--megablocks-layer", "tutel"], "megablocks_"),
        (["--", "--help"], "--help: for the driver's flags, run python -m megablocks.megatron.pretrain_gpt --help"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--" in words:
        pytest.importorskip("megatron.training")
    assert main(["plan", *words]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith(f"megablocks plan: {said}") and out.err.count("\n") == 1


def test_text_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *FLAGS, "--num-experts", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", *FLAGS, "--num-experts", "4"]) == 0
    text = capsys.readouterr().out
    assert text == plan.text_of(found) + "\n" and text.endswith(found["verdict"] + "\n")
    for name, size in found["memory"]["parts"].items():
        assert f"  {name:<50}{size:>10.2f}" in text
    assert sum(found["memory"]["parts"].values()) == pytest.approx(found["memory"]["peak"])
    assert sum(found["step"]["parts"].values()) == pytest.approx(found["step"]["ms"])


def test_a_model_that_does_not_fit_exits_1_and_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    words = []
    for one in dataclasses.fields(SMALL):
        value = getattr(SMALL, one.name)
        if isinstance(value, int) and not isinstance(value, bool) and value:
            words += [f"--{one.name.replace('_', '-')}", str(value)]
    large = ["--micro-batch-size", "512", "--global-batch-size", "512"]
    assert main(["plan", *words, *large]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("does not fit: ") and "; --micro-batch-size 128 needs 104." in line
    assert main(["plan", *words, "--gpu", "NVIDIA H100 80GB HBM3"]) == 1
    assert "does not fit" in capsys.readouterr().out.splitlines()[-1]
    assert main(["plan", *words, "--gpu", "Some New GPU"]) == 0
    text = capsys.readouterr().out
    assert "step time: unknown" in text and text.rstrip().endswith("the memory of Some New GPU is unknown here")


def _with(m: Model = SMALL, **values: Any) -> Model:
    return dataclasses.replace(m, **values)


def test_parameters_of_small_by_hand() -> None:
    experts, dense = 12 * 64 * 2 * 768 * 3072, 12 * (4 * 768**2 + 4 * 768 + 768 * 64) + 768 * (32768 + 1024)
    found = memory.parameters(SMALL)
    assert found.total == experts + dense and found.active == experts // 64 + dense
    assert found.per_gpu == found.total and found.experts_per_gpu == experts
    spread = memory.parameters(_with(gpus=8, expert_model_parallel_size=8, global_batch_size=1024))
    assert spread.experts_per_gpu == experts // 8 and spread.dense_per_gpu == dense


@pytest.mark.parametrize("impl", [name for name in IMPLS if name != "reference"])
def test_what_the_experts_keep_is_the_table_of_the_page(impl: str) -> None:
    """docs/saving_memory.md, 2 bytes a value; `sparse` pads each expert to blocks of 128."""
    m = _with(mlp_impl=impl)
    tokens, hidden, width = 128 * 1024, 768, 3072
    padded = tokens + 128 * 64 * IMPLS[impl].pads
    page = {"fused": (0, 1, 0, 0), "scatter": (0, 1, 1, 0), "grouped": (0, 1, 1, 1), "sparse": (1, 1, 1, 1)}[impl]
    each = (hidden, width, width, hidden)
    by_hand = 2 * (tokens * hidden + padded * sum(n * size for n, size in zip(page, each, strict=True)))
    assert memory.expert_activations(m) == by_hand
    again = memory.expert_activations(_with(m, recompute_activation=True))
    left_out = width if impl == "fused" else width * page[2]
    assert again == by_hand - 2 * padded * left_out
    MoEConfig(hidden_size=8, ffn_hidden_size=64, num_experts=2, mlp_impl=impl, recompute_activation=True)


@pytest.mark.parametrize(
    ("sizes", "row"), [((65536, 512, 2048, 64, 1, False), "XS"), ((24576, 1536, 256, 128, 8, True), "24576, 1536;")]
)
def test_what_a_layer_keeps_is_what_was_measured(sizes: tuple[int, int, int, int, int, bool], row: str) -> None:
    """The MiB of docs/saving_memory.md, with the steps above they chose what the router keeps."""
    tokens, hidden, width, experts, top_k, gated = sizes
    page = (ROOT / "docs/saving_memory.md").read_text().split("Measured, MiB held")[1]
    m = Model(
        num_layers=1, hidden_size=hidden, num_attention_heads=8, seq_length=tokens, micro_batch_size=1,
        num_experts=experts, moe_router_topk=top_k, moe_ffn_hidden_size=width, swiglu=gated,
    )  # fmt: skip
    compared = 0
    for line in page.splitlines():
        if not line.startswith(f"| {row}"):
            continue
        _, shape, *measured, _ = line.split("|")
        for impl, mib in zip(("fused", "scatter", "grouped", "sparse"), measured, strict=True):
            one = _with(m, mlp_impl=impl, recompute_activation="recompute" in shape)
            parts = memory.layer_activations(one)
            # A small constant: rows of indices, and the blocks of the allocator.
            assert (parts["experts"] + parts["router"]) / 2**20 == pytest.approx(float(mib), rel=0.03, abs=12)
            compared += 1
    assert compared == (8 if row == "XS" else 4)


def test_what_saves_memory_saves_it() -> None:
    def peak(m: Model) -> float:
        return memory.memory(m).peak

    eight = _with(gpus=8, global_batch_size=1024)
    assert peak(_with(recompute_granularity="full")) < peak(_with(recompute_activation=True, mlp_impl="fused"))
    assert peak(_with(recompute_activation=True, mlp_impl="fused")) < peak(SMALL) < peak(_with(mlp_impl="grouped"))
    assert peak(_with(fused_loss=False)) > peak(SMALL)
    assert peak(_with(eight, use_distributed_optimizer=True)) < peak(eight)
    assert peak(_with(eight, expert_model_parallel_size=8)) < peak(eight)
    tensor = _with(eight, tensor_model_parallel_size=2, expert_tensor_parallel_size=None, global_batch_size=None)
    parallel = _with(tensor, sequence_parallel=True)
    assert memory.memory(parallel).peak < memory.memory(tensor).peak < peak(eight)
    stages = _with(eight, pipeline_model_parallel_size=2, global_batch_size=1024)
    assert memory.memory(stages).parts["weights"] < 0.6 * memory.memory(eight).parts["weights"]


def test_layouts_cost_communication() -> None:
    eight = _with(gpus=8, global_batch_size=1024)
    alone, spread = step_time.step_time(eight), step_time.step_time(_with(eight, expert_model_parallel_size=8))
    assert alone is not None and spread is not None
    assert "communication: all-to-all of the experts" in spread.parts
    assert "communication: gradients over data-parallel ranks" in alone.parts
    assert alone.error_bar == spread.error_bar == step_time.ERROR_BAR_LAYOUT
    stages = step_time.step_time(_with(eight, pipeline_model_parallel_size=2))
    assert stages is not None and stages.parts["communication: pipeline bubble"] > 0
    assert step_time.step_time(_with(bf16=False)) is None
    again = step_time.step_time(_with(recompute_granularity="full"))
    assert again is not None and again.milliseconds > step_time.step_time(SMALL).milliseconds  # type: ignore[union-attr]


def _part(m: Model, name: str, **on: Any) -> float:
    time = step_time.step_time(m, step_time.Conditions(host_gb=200.0, network_gb=20.0, **on))
    assert time is not None
    return time.parts.get(name, 0.0)


def test_an_all_to_all_uses_both_kinds_of_links() -> None:
    """By hand: 2 bytes, 4 exchanges a layer, FINE's 24 layers, 8 micro-batches on a rank, rows of 8 experts a token."""
    name, rows = "communication: all-to-all of the experts", 8 * 4096 * 8
    for ranks, over in ((8, 7 / 8 / 200e9), (16, max(7 / 16 / 200e9, 8 / 16 / 20e9))):
        m = _with(FINE, gpus=ranks, expert_model_parallel_size=ranks, global_batch_size=64 * ranks)
        once = rows * 768 * 2 * over * 1e3
        assert _part(m, name) == pytest.approx(8 * 24 * 4 * once)
        late = _part(m, name, host_us=50.0, network_us=90.0) - _part(m, name)
        assert late == pytest.approx(8 * 24 * 4 * (0.05 if ranks == 8 else 0.09))
    two = _with(FINE, gpus=2, expert_model_parallel_size=2, global_batch_size=128)
    # A token's eight experts lie on one of two ranks with a chance of 2 · C(64, 8) / C(128, 8) = 0.0062.
    assert _part(two, name, row_a_rank=True) == pytest.approx(_part(two, name) * (2 - 0.0062) / 8, rel=1e-4)


def test_rings_over_hosts_share_adapters() -> None:
    name = "communication: gradients over data-parallel ranks"
    many = _with(FINE, gpus=64, global_batch_size=512)
    p = memory.parameters(many)
    assert _part(many, name) == pytest.approx(8 * p.per_gpu * 63 / 64 / 160e9 * 1e3)
    p = memory.parameters(apart := _with(many, expert_model_parallel_size=8))
    dense, experts = 8 * p.dense_per_gpu * 63 / 64 / 160e9, 8 * p.experts_per_gpu * 7 / 8 / 20e9
    assert _part(apart, name) == pytest.approx((dense + experts) * 1e3)
    sharded = _with(many, use_distributed_optimizer=True)
    assert _part(sharded, name) == pytest.approx(_part(many, name) * 6 / 8)


def test_the_fullest_rank_and_the_last_stage_are_waited_for() -> None:
    m = _with(FINE, gpus=8, expert_model_parallel_size=4, pipeline_model_parallel_size=2, global_batch_size=256)
    time = step_time.step_time(m, step_time.Conditions(skew=1.5))
    assert time is not None
    parts = time.parts
    busy = parts["experts"] + parts["communication: all-to-all of the experts"]
    assert parts["waiting for the fullest rank"] == pytest.approx(busy / 2)
    assert parts["waiting for the last stage"] == parts["embedding and loss"]
    once = ("optimizer", "gradients", "communication: gradients over data-parallel ranks")
    each = sum(ms for name, ms in parts.items() if name not in (*once, "communication: pipeline bubble"))
    assert parts["communication: pipeline bubble"] == pytest.approx(each / m.micro_batches)
    known = step_time.step_time(FINE, step_time.Conditions(experts_tflops=989.4 / 4))
    assert known is not None
    assert known.parts["experts"] == pytest.approx(4 / 2.20 * step_time.step_time(FINE).parts["experts"])  # type: ignore[union-attr]


def test_a_field_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="num_layers=0: must be >= 1"):
        _with(num_layers=0)
    with pytest.raises(ConfigError, match="must divide num_layers=12"):
        _with(gpus=5, pipeline_model_parallel_size=5, global_batch_size=None)
    with pytest.raises(ConfigError, match="expert_model_parallel_size=5: must divide num_experts=64"):
        _with(gpus=5, expert_model_parallel_size=5, global_batch_size=None)
