"""`plan`: it stays within its error bars on every measured step, and a driver's flags mean the same as its own."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
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
from megablocks.megatron.pretrain_gpt import missing
from megablocks.tool import memory, plan, step_time
from megablocks.tool.commands import main
from megablocks.tool.model import Model

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/h200"
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))  # last, because some scripts have the names of test folders
scaling = importlib.import_module("scaling")
INPUTS = scaling.read_inputs(ROOT / "benchmarks/scaling_inputs.json")
STEPS = {one["arm"]: one for one in INPUTS["steps"]}
ROWS = {arm: scaling.model_of(INPUTS, one) for arm, one in STEPS.items()}
MEASURED = [arm for arm, one in STEPS.items() if scaling.runs_of(one)]
SMALL = ROWS["dmoe-small"]
FINE = dataclasses.replace(ROWS["dmoe-fine-32"], micro_batch_size=8)
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2".split()
DRIVER_FLAGS = [*FLAGS, *"--max-position-embeddings 32 --position-embedding-type rope --vocab-size 64 --bf16".split()]


def test_the_newest_steps_are_compared_and_enough_set_nothing() -> None:
    newest = json.loads((RESULTS / "training_step_2026_11_30.json").read_text())["records"]
    assert {one["arm"] for one in newest} <= {*MEASURED, "dense-small-graph"}
    free = [ROWS[arm] for arm in MEASURED if "sets" not in STEPS[arm]]
    assert len(free) >= 5 and {m.gpus for m in free} == {1, 2}


@pytest.mark.parametrize("arm", MEASURED)
def test_a_measured_step_is_within_the_error_bars(arm: str) -> None:
    found, time = memory.memory(ROWS[arm]), step_time.step_time(ROWS[arm])
    assert time is not None and time.error_bar == 0.20
    assert found.error_bar == 0.10
    for one in scaling.runs_of(STEPS[arm]):
        assert found.peak / memory.GIB == pytest.approx(one["peak_gib"], rel=0.10)
        assert one["ms"] == pytest.approx(time.milliseconds, rel=0.15)
    assert time.tokens_per_second == pytest.approx(ROWS[arm].tokens / time.milliseconds * 1e3)


FINE_XS = {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 256}
SHARED = {**FINE_XS, "moe_router_topk": 7, "moe_shared_expert_intermediate_size": 256}
RUNS = [  # model and arm of the comparisons, how many runs there are, the planned row that it is, with what changes
    ("xs", "dense", 8, "dense-xs", {}), ("xs", "dmoe", 8, "dmoe-xs", {}),
    ("xs", "fine", 3, "dmoe-xs", FINE_XS), ("xs", "fine-shared", 4, "dmoe-xs", SHARED),
    ("small", "dense", 1, "dense-small", {}), ("small", "dmoe", 1, "dmoe-small", {"micro_batch_size": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "arm", "count", "row", "changes"), RUNS)
def test_a_run_of_a_comparison_is_within_the_error_bars(
    model: str, arm: str, count: int, row: str, changes: dict[str, Any]
) -> None:
    files = sorted(RESULTS.parent.glob("h?00/paper_*/record.json"))
    records = [json.loads(file.read_text()) for file in files]
    measured = [
        one for record in records if record["settings"]["model"] == model for one in record["runs"] if one["arm"] == arm
    ]
    assert len(measured) == count
    for one in measured:
        m = _with(ROWS[row], gpu=one["environment"]["gpu"], **changes)
        found, time = memory.memory(m), step_time.step_time(m)
        assert time is not None and (found.error_bar, time.error_bar) == (0.10, 0.20)
        assert m.micro_batch_size == one["micro_batch"] and m.global_batch_size == one["batch"]
        assert found.peak / memory.GIB == pytest.approx(one["peak_gib"], rel=0.10)
        if one["environment"]["commit"] != "d8d80be":  # other models trained on its host at the same time
            assert one["step_ms"] == pytest.approx(time.milliseconds, rel=0.20)


OTHERS = {  # files with steps of other code or another GPU, and which planned row each arm is
    "h100/training_step.json": {
        "dmoe-xs": "dmoe-xs", "dense-xs": "dense-xs", "dense-small": "dense-small", "dmoe-small-16": "dmoe-small-16",
        "eight-1": "eight-1", "dmoe-xs-graph": "dmoe-xs", "eight-1-graph": "eight-1",
    },
    "h200/training_step_2026_11_26.json": {
        "dmoe-xs": "dmoe-xs", "dense-xs": "dense-xs", "dense-small": "dense-small", "dmoe-small": "dmoe-small",
        "fine-1": "fine-1",
    },
}  # fmt: skip


@pytest.mark.parametrize(("file", "arm"), [(file, arm) for file, arms in OTHERS.items() for arm in arms])
def test_a_step_of_other_code_or_another_gpu_is_within_the_error_bars(file: str, arm: str) -> None:
    kept = json.loads((RESULTS.parent / file).read_text())
    graph = "full_iteration" if arm.endswith("-graph") else "none"
    m = _with(ROWS[OTHERS[file][arm]], gpu=kept["environment"]["gpu"], cuda_graph_impl=graph)
    found, time = memory.memory(m), step_time.step_time(m)
    measured = [one for one in kept["records"] if one["arm"] == arm]
    assert time is not None and measured
    for one in measured:
        assert found.peak / memory.GIB == pytest.approx(one["peak_gib"], rel=0.10)
        assert 0.8 <= one["ms"] / time.milliseconds <= 1.2


@pytest.mark.parametrize(
    ("profile", "arm", "size"),
    [("dmoe_small", "dmoe-small", 128), ("dmoe_fine", "dmoe-fine-32", 32), ("dense_small", "dense-small", 128)],
)
def test_each_part_is_that_of_its_profile(profile: str, arm: str, size: int) -> None:
    parts = json.loads((RESULTS / f"profiles/{profile}.json").read_text())["parts"]
    measured = {one["part"]: one["ms"] for one in parts}
    planned = step_time.step_time(_with(ROWS[arm], micro_batch_size=size)).parts  # type: ignore[union-attr]
    if profile == "dense_small":  # a dense layer sums a bias's gradient in a pass of its own, which is not planned
        assert 1 < measured.pop("elementwise") / planned["elementwise"] < 1.2
    for part in step_time.TIMES.keys() & planned.keys() & measured.keys() - {"gradients"} | {"attention"}:
        assert planned[part] == pytest.approx(measured[part], rel=0.07), part
    # What adds up gradients of tokens counts as copies in the plan.
    both = planned["gradients"] + planned["copies"], measured["gradients"] + measured["copies"]
    assert both[0] == pytest.approx(both[1], rel=0.12)


def test_small_steps_wait_for_the_host_and_ranks_for_one_another() -> None:
    """By hand: the host takes 9.4 ms for a step and 5.9 for each layer of a micro-batch, more than the GPU needs."""
    one, two = (step_time.step_time(ROWS[arm]) for arm in ("eight-1", "eight-ep2"))
    assert one is not None and two is not None
    assert one.milliseconds == pytest.approx(9.4 + 8 * 5.9)
    gradients = two.parts["communication: gradients over data-parallel ranks"]
    assert two.milliseconds == pytest.approx(9.4 + 8 * 5.9 + gradients + 15.0)  # the exchange hides behind the host
    again = step_time.step_time(_with(ROWS["eight-1"], recompute_granularity="full"))
    assert again is not None and again.milliseconds == pytest.approx(9.4 + 8 * 5.9 * 4 / 3)
    large = step_time.step_time(SMALL)
    assert large is not None and large.parts["idle"] == step_time.IDLE_MS


def test_a_graph_is_named_where_the_host_limits_the_step() -> None:
    eager, captured = ROWS["larger-dmoe-medium"], ROWS["larger-dmoe-medium-graph"]
    times = [step_time.step_time(m).milliseconds for m in (eager, captured)]  # type: ignore[union-attr]
    assert times[1] < 0.5 * times[0]
    flags = "--cuda-graph-impl full_iteration --megablocks-dispatcher symmetric"
    assert plan.advice(eager) == f"the host limits the speed; with {flags} a step takes {times[1]:.1f} ms"
    assert "with --cuda-graph-impl full_iteration a step" in plan.advice(ROWS["eight-1"])
    assert flags in plan.advice(_with(eager, gpus=8, expert_model_parallel_size=8, global_batch_size=512))
    for m in (captured, ROWS["dmoe-small"], _with(eager, gpu="unknown"), _with(eager, recompute_granularity="full"),
              _with(eager, gpus=4, context_parallel_size=2)):  # fmt: skip
        assert plan.advice(m) == ""


@pytest.mark.parametrize(
    "layout",
    [{"gpus": 2, "tensor_model_parallel_size": 2}, {"gpus": 2, "context_parallel_size": 2},
     {"gpus": 2, "pipeline_model_parallel_size": 2}, {"recompute_granularity": "full"},
     {"gpus": 2, "expert_model_parallel_size": 2, "dispatcher": "all_to_all"}],
)  # fmt: skip
def test_a_step_that_no_graph_can_hold_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^cuda_graph_impl='full_iteration': needs TP, PP and CP of 1, no recompute"):
        _with(cuda_graph_impl="full_iteration", **layout)


def test_a_dense_model_that_waits_for_the_host_has_no_error_bar(capsys: pytest.CaptureFixture[str]) -> None:
    dense = ROWS["dense-small"]  # 220 ms of the GPU, 9.4 + 2 · 12 · 5.9 of the host
    bars = {1: None, 16: None, 32: None, 64: 0.20, 128: 0.20}  # at 32 the host takes 293 ms
    for size, bar in bars.items():
        time = step_time.step_time(_with(dense, micro_batch_size=size))
        assert time is not None and time.error_bar == bar, size
    half = _with(ROWS["eight-1"], num_moe_layers=4)
    for m, bar in ((ROWS["eight-1"], 0.20), (half, None), (_with(half, gpus=4, global_batch_size=None), None)):
        assert step_time.step_time(m).error_bar == bar  # type: ignore[union-attr]
    assert main(["plan", *FLAGS]) == 0
    _, below = capsys.readouterr().out.split("together ")
    total, reason, *_ = below.splitlines()
    assert "±" not in total and reason.startswith("no error bar: the host limits the speed")
    assert main(["plan", *FLAGS, "--num-experts", "4"]) == 0
    assert "± 20%\n" in capsys.readouterr().out
    assert main(["plan", *FLAGS, "--num-experts", "4", "--gpus", "4"]) == 0
    assert "± 20%, a guess\n" in (text := capsys.readouterr().out) and "± 40%, a guess\n" in text


def test_the_verdict_names_the_error_bar_that_it_counts() -> None:
    """By hand: dMoE-Small with micro-batches of 128 needs 102.4 GiB; the bar is 10 % of the peak of 98.8."""
    found = memory.memory(SMALL)
    for capacity, fits, start in (
        (112.4, "yes", "fits: 102.4 ± 9.9 of 112.4 GiB"),
        (112.2, "maybe", "may not fit: 102.4 ± 9.9 of 112.2 GiB; --micro-batch-size 64 needs 83.5 ± 8.0"),
        (102.3, "no", "does not fit: 102.4 ± 9.9 of 102.3 GiB; --micro-batch-size 64 needs 83.5 ± 8.0"),
    ):
        assert plan.verdict(SMALL, found, capacity) == (fits, start)


def test_a_gpu_of_unknown_memory_keeps_all_logits() -> None:
    """A tenth of that memory is unknown. By hand: 131,072 tokens times 32,768 words in 2 bytes are 8 GiB."""
    unknown = _with(SMALL, gpu="Some New GPU", fused_loss_kept_gib=None, mlp_impl="fused")
    found = memory.memory(unknown)
    assert found.parts["loss: kept logits"] == 8 * 2**30 < SMALL.kept_logits
    assert found.peak == memory.memory(SMALL).peak
    _, line = plan.verdict(unknown, found, None)
    assert line == "needs 102.4 ± 9.9 GiB a GPU, if it keeps all logits; the memory of Some New GPU is unknown here"
    none = _with(unknown, fused_loss_kept_gib=0.0)
    assert "loss: kept logits" not in memory.memory(none).parts
    assert "logits" not in plan.verdict(none, memory.memory(none), None)[1]
    assert json.loads(json.dumps(plan.report(unknown), allow_nan=False))["model"]["fused_loss_kept_gib"] is None


def test_attention_pays_for_exponentials_and_dropout_by_hand() -> None:
    def attention(m: Model) -> float:
        return step_time.step_time(m).parts["attention"]  # type: ignore[union-attr]

    # 14 FLOPs a score and feature; an exponential is 256 of them, in forward and backward.
    wide = _with(FINE, num_attention_heads=6, kv_channels=128, num_query_groups=6)
    assert attention(wide) / attention(FINE) == pytest.approx((1 + 2 * 256 / 14 / 128) / (1 + 2 * 256 / 14 / 64))
    scores = 64 * 4096 * 2048 * 12 * 24  # tokens, half of the sequence, heads, layers
    dropped = attention(_with(FINE, attention_dropout=0.1)) - attention(FINE)
    assert dropped == pytest.approx(2 * 1284 * scores / 989.4e12 * 1e3)
    grouped, plain = (step_time.step_time(_with(FINE, num_query_groups=n)) for n in (3, 12))
    more = 4 * (12 + 3) * 64 * 64 * 4096 * 24 * 2 / 4.8e12 * 1e3
    assert grouped is not None and plain is not None
    assert grouped.parts["copies"] - plain.parts["copies"] == pytest.approx(more)


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
        (
            "dmoe-fine-32",
            "dmoe/dmoe_fine_1gpu.sh",
            "--global-batch-size 64 --micro-batch-size 32",
        ),
    ],
)
def test_the_drivers_flags_mean_the_same(name: str, script: str, flags: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    before = dict(os.environ)
    found, _ = plan.model_of(["--", *_driver_flags(script, flags, tmp_path)])
    assert os.environ == before
    assert plan.report(found)["memory"] == plan.report(ROWS[name])["memory"]
    assert plan.report(found)["step"] == plan.report(ROWS[name])["step"]


def test_a_driver_that_counts_samples_is_read() -> None:
    pytest.importorskip("megatron.training")
    found, _ = plan.model_of(["--", *DRIVER_FLAGS, "--train-samples", "512"])
    assert found == plan.model_of(["--", *DRIVER_FLAGS])[0]


def test_a_layout_of_the_driver_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.training")
    flags = _driver_flags("dmoe/dmoe_125m_8gpu.sh", "--use-distributed-optimizer", tmp_path, 8)
    assert main(["plan", "--gpus", "8", "--json", "--", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["expert_model_parallel_size"] == 8 and found["model"]["use_distributed_optimizer"]
    assert found["mlp_impl"] == "fused" and found["model"]["global_batch_size"] == 512
    assert found["memory"]["error_bar"] == memory.ERROR_BAR_LAYOUT


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tensor_model_parallel_size": 2}),
        ("--context-parallel-size 2", {"context_parallel_size": 2}),
        ("--num-experts 4 --moe-grouped-gemm", {"num_experts": 4}),
        ("--qk-layernorm --megablocks-qk-norm all", {"qk_layernorm": True, "qk_norm": "all"}),
    ],
)
def test_a_layout_for_which_megatron_asks_the_gpu_is_read_without_one(flags: str, sizes: dict[str, int]) -> None:
    pytest.importorskip("megatron.training")
    found, _ = plan.model_of(["--gpus", "8", "--", *DRIVER_FLAGS, *flags.split()])
    assert {name: getattr(found, name) for name in sizes} == sizes and found.gpus == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (FLAGS[:-2], "--micro-batch-size is missing; give it, or the driver's flags after --"),
        ([*FLAGS, "--moe-num-experts", "4"], "--moe-num-experts: no flag of plan; give the driver's flags after --"),
        ([*FLAGS, "--tensor-model-parallel-size", "2"], "gpus=1: must be a multiple of TP · PP · CP = 2"),
        ([*FLAGS, "--num-experts", "3", "--moe-router-topk", "4"], "moe_router_topk=4: must be 1 to num_experts=3"),
        ([*FLAGS, "--mlp-impl", "reference"], "mlp_impl='reference': is for tests; nothing is known about its time"),
        ([*FLAGS, "--global-batch-size", "3"], "global_batch_size=3: must be a multiple of micro_batch_size=2 times"),
        ([*FLAGS, "--global-batch-size", "0"], "global_batch_size=0: must be >= 1"),
        ([*FLAGS, "--fused-loss-kept-gib", "nan"], "fused_loss_kept_gib=nan: must be >= 0"),
        ([*FLAGS, "--hidden-size", f"-{10**400}"], f"hidden_size=-{10**400}: must be >= 1\n"),
        ([*FLAGS, "--seq-length", f"{2**63}"], f"seq_length={2**63}: must be >= 1 and below 2**63\n"),
        ([*FLAGS, "--num-experts", "-2"], "num_experts=-2: must be >= 0"),
        ([*FLAGS, "--fused-loss-kept-gib", "inf"], "fused_loss_kept_gib=inf: must be >= 0 and finite"),
        ([*FLAGS, "--hidden-dropout", "7"], "hidden_dropout=7.0: must be 0 to 1"),
        ([*FLAGS, "--attention-dropout", "1.5"], "attention_dropout=1.5: must be 0 to 1"),
        ([*FLAGS, "--attention-dropout", "nan"], "attention_dropout=nan: must be 0 to 1"),
        ([*FLAGS, "--num-attention-heads", "65"],
         "num_attention_heads=65: must divide hidden_size=64, or give --kv-channels"),
        ([*FLAGS, "--num-attention-heads", "3"],
         "num_attention_heads=3: must divide hidden_size=64, or give --kv-channels"),
        ([*FLAGS, "--kv-channels", "3", "--position-embedding-type", "rope"],
         "kv_channels=3: must be even with --position-embedding-type rope"),
        ([*FLAGS, "--gpus", "8", "--tensor-model-parallel-size", "8"],
         "tensor_model_parallel_size=8: must divide num_attention_heads=4"),
        ([*FLAGS, "--gpu", ""], "gpu='': must be a GPU's name, such as 'NVIDIA H200'"),
        (["--gpu", " ", "--", *DRIVER_FLAGS], "gpu=' ': must be a GPU's name, such as 'NVIDIA H200'"),
        ([*FLAGS, "--num-experts", "4", "--dispatch-rows-factor", "0"],
         "dispatch_rows_factor=0.0: must be a finite number > 0"),
        ([*FLAGS, "--num-experts", "4", "--mlp-impl", "scatter", "--quantize-rematerialize-num-bits", "8"],
         "quantize_rematerialize_num_bits=8: must be -1 with mlp_impl='scatter', or use 'auto'"),
        ([*FLAGS, "--num-attention-heads", "4", "--num-query-groups", "3"],
         "num_query_groups=3: must divide num_attention_heads=4"),
        ([*FLAGS, "--num-moe-layers", "3", "--num-experts", "4"], "num_moe_layers=3: must be <= 2, for num_layers=2"),
        ([*FLAGS, "--num-moe-layers", "2"], "num_moe_layers=2: must be <= 0, for num_experts=0"),
        (
            [*FLAGS, "--expert-model-parallel-size", "2", "--use-distributed-optimizer"],
            "expert_model_parallel_size=2: must divide num_experts=0, and EP · expert TP · PP = 2 must divide gpus=1",
        ),
        (
            [*FLAGS, "--num-experts", "4", "--mlp-impl", "sparse", "--moe-ffn-hidden-size", "100"],
            "moe_ffn_hidden_size=100: must be a multiple of 64 with mlp_impl='sparse', or use mlp_impl='auto'",
        ),
        ([*FLAGS, "--qk-norm", "all"], "qk_norm='all': needs qk_layernorm=True and TP 1, not False and 1"),
        (["--gpus", "0", "--", *FLAGS], "gpus=0: must be >= 1"),
        (["--num-layers", "2", "--"], "--num-layers: give it after --, with the driver's flags"),
        (["--", "torchrun", "-m", "megablocks.megatron.pretrain_gpt", *DRIVER_FLAGS],
         "torchrun: leave it out; only the driver's flags come after --, and --gpus N before --"),
        (["--", "--num-layer", "2"], "--num-layer: no such flag, did you mean --num-layers?"),
        (["--", *FLAGS, "--num-experts", "4", "--megablocks-layer", "tutel"], "megablocks_"),
        (
            ["--", *DRIVER_FLAGS, "--multi-latent-attention"],
            "multi_latent_attention=True: is not planned, leave it out",
        ),
        (["--", *DRIVER_FLAGS, "--hidden-dropout", "7"], "hidden_dropout=7.0: must be 0 to 1"),
        (["--", *DRIVER_FLAGS, "--weight-decay", "-1"], "weight_decay=-1.0: must be >= 0"),
        (
            ["--gpus", "2", "--", *DRIVER_FLAGS, "--pipeline-model-parallel-size", "2",
             "--decoder-first-pipeline-num-layers", "1"],
            "decoder_first_pipeline_num_layers=1: is not planned, leave it out; stages of unequal numbers of layers",
        ),
        (
            ["--", *DRIVER_FLAGS, "--use-checkpoint-args", "--load", "runs/x"],
            "use_checkpoint_args=True: is not planned, leave it out; the sizes of a checkpoint are not read; give",
        ),
        (["--", *DRIVER_FLAGS, "--optimizer", "sgd"], "optimizer='sgd': must be 'adam'; no other optimizer's state is"),
        (
            ["--", *DRIVER_FLAGS, *"--recompute-granularity full --recompute-method block".split(),
             "--recompute-num-layers", "1"],
            "recompute_method='block': must be 'uniform'; only a recomputation of all layers is counted",
        ),
        (
            ["--", *DRIVER_FLAGS, "--recompute-granularity", "full"],
            "recompute_method=None: must be 'uniform'; only a recomputation of all layers is counted",
        ),
        (
            ["--", *DRIVER_FLAGS, *"--recompute-granularity full --recompute-method uniform".split()],
            "recompute_num_layers=None: must be 1; only single layers' inputs are counted",
        ),
        (
            ["--", *DRIVER_FLAGS, "--use-distributed-optimizer", "--use-precision-aware-optimizer"],
            "use_precision_aware_optimizer=True: ",
        ),
        (["--", *DRIVER_FLAGS, "--mtp-num-layers", "1"], "mtp_num_layers=1: is not planned, leave it out; the layers"),
        (
            ["--", *DRIVER_FLAGS, "--spec", "my.layers", "block"],
            "spec=['my.layers', 'block']: is not planned, leave it out; the layers of a spec are not known",
        ),
        (["--", *DRIVER_FLAGS, "--attention-output-gate"], "attention_output_gate=True: is not planned, leave it out"),
        (
            ["--", *DRIVER_FLAGS[:-3], "--data-prefix", "no/data"],
            "no/data: no such data folder: make one with scripts/prepare_data.py, or give --vocab-size instead of",
        ),
        (["--", "--help"], "--help: for the driver's flags, run python -m megablocks.megatron.pretrain_gpt --help"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--" in words and (problem := missing()):  # importing Megatron here would print torch's line about a GPU
        pytest.skip(problem)
    assert main(["plan", *words]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith(f"megablocks plan: {said}") and out.err.count("\n") == 1


@pytest.mark.parametrize("flag", ["tensor-model", "pipeline-model", "expert-model", "expert-tensor", "context"])
@pytest.mark.parametrize("size", ["0", "-1"])
def test_no_parallel_size_is_below_1(flag: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{flag}-parallel-size"
    assert main(["plan", *FLAGS, "--num-experts", "4", f"--{name}", size]) == 2
    assert capsys.readouterr().err == f"megablocks plan: {name.replace('-', '_')}={size}: must be >= 1\n"


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
    assert line.startswith("does not fit: ") and "; --micro-batch-size 128 needs 102." in line
    assert main(["plan", *words, "--gpu", "NVIDIA H100 80GB HBM3"]) == 1
    assert "does not fit" in capsys.readouterr().out.splitlines()[-1]
    assert main(["plan", *words, "--gpu", "Some New GPU"]) == 0
    text = capsys.readouterr().out
    assert "step time: unknown" in text and text.rstrip().endswith("the memory of Some New GPU is unknown here")


@pytest.mark.parametrize("of_driver", [False, True])
def test_what_to_change_is_a_flag_of_the_same_command_line(of_driver: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 4 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 128"
    words = [*sizes.split(), "--vocab-size", "100000", "--no-fused-loss"]
    if of_driver:
        pytest.importorskip("megatron.training")
        words = ["--", *words[:-1], "--no-megablocks-fused-loss", "--max-position-embeddings", "1024", "--bf16"]
    assert main(["plan", *words]) == 1
    (change,) = re.findall(r"; (--\S+) needs ", capsys.readouterr().out.splitlines()[-1])
    assert main(["plan", *words, change]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fits: ")


@pytest.mark.parametrize("of_driver", [False, True])
def test_full_recomputation_is_proposed_as_the_driver_takes_it(
    of_driver: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron refuses --recompute-granularity full without a method and a number of layers. plan's own has neither."""
    words = "--num-layers 64 --hidden-size 8192 --num-attention-heads 64 --seq-length 32768".split()
    words += "--micro-batch-size 1 --vocab-size 50000".split()
    words += "--tensor-model-parallel-size 8 --use-distributed-optimizer".split()
    change = "--recompute-granularity full"
    if of_driver:
        pytest.importorskip("megatron.training")
        words = ["--", *words, "--bf16"]
        change += " --recompute-method uniform --recompute-num-layers 1"
    assert main(["plan", "--gpus", "64", *words]) == 1
    assert f"; {change} needs " in capsys.readouterr().out.splitlines()[-1]
    assert main(["plan", "--gpus", "64", *words, *change.split()]) == 0


def test_the_example_that_does_not_fit_is_told_right(capsys: pytest.CaptureFixture[str]) -> None:
    page = re.sub(r"\\\n\s+", "", (ROOT / "docs/tool.md").read_text())
    (command,) = re.findall(r"(?m)^    python -m megablocks (plan --num-layers .*H100.*)$", page)
    assert main(shlex.split(command)) == 1
    (named,) = re.findall(r"This one does not; the line names `([^`]+)`", page)
    assert f"; {named} needs " in capsys.readouterr().out.splitlines()[-1]


def _with(m: Model = SMALL, **values: Any) -> Model:
    return dataclasses.replace(m, **values)


def test_parameters_of_small_by_hand() -> None:
    experts, dense = 12 * 64 * 2 * 768 * 3072, 12 * (4 * 768**2 + 4 * 768 + 768 * 64) + 768 * (32768 + 1024 + 2)
    found = memory.parameters(SMALL)
    assert found.total == experts + dense and found.active == experts // 64 + dense
    assert found.per_gpu == found.total and found.experts_per_gpu == experts
    spread = memory.parameters(_with(gpus=8, expert_model_parallel_size=8, global_batch_size=1024))
    assert spread.experts_per_gpu == experts // 8 and spread.dense_per_gpu == dense
    # Tensor parallelism splits no norms, routers or positions, and no biases of what is summed over its ranks.
    two = {"gpus": 2, "tensor_model_parallel_size": 2}
    half = 12 * (2 * 768**2 + 4 * 768 + 768 * 64) + 768 * (16384 + 1024 + 2)
    assert memory.parameters(_with(**two)).dense_per_gpu == half
    biased = _with(num_experts=0, num_moe_layers=0, ffn_hidden_size=3072, add_bias_linear=True)
    one, rank = (memory.parameters(m).dense_per_gpu for m in (biased, _with(biased, **two)))
    assert 2 * rank - one == 12 * 6 * 768 + 768 * (1024 + 2)


def test_norms_of_queries_and_keys_by_hand() -> None:
    """What attention keeps was counted on a CPU, of Megatron's layer with our norms, in float32 values a token."""
    sizes = {"num_attention_heads": 8, "kv_channels": 16, "seq_length": 32, "micro_batch_size": 1, "bf16": False}
    plain = Model(num_layers=3, hidden_size=64, hidden_dropout=0, **sizes)
    for qk_norm, parameters, values in (("head", 4 * 16, 872), ("all", 2 * 256, 1100)):
        m = _with(plain, qk_layernorm=True, qk_norm=qk_norm)
        more = memory.parameters(m).total - memory.parameters(plain).total
        assert more == 3 * parameters
        assert memory.layer_activations(m)["attention"] == 4 * 32 * values
        assert step_time.run_sizes(m).qk_norms and not step_time.run_sizes(plain).qk_norms
    turned = _with(plain, position_embedding_type="rope")
    one, more = (memory.layer_activations(m)["attention"] for m in (turned, _with(turned, qk_layernorm=True)))
    assert more - one == 32 * 8 * 16, "a mean and a scale for each head: the norm's output is not kept"


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


@pytest.mark.parametrize("gpu, measured", [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True),
                                           ("NVIDIA H200 NVL", False), ("NVIDIA H100 PCIe", False)])  # fmt: skip
def test_a_card_that_was_not_measured_has_the_larger_error_bar(gpu: str, measured: bool) -> None:
    time = step_time.step_time(_with(gpu=gpu))
    assert time is not None
    assert time.error_bar == (step_time.ERROR_BAR if measured else step_time.ERROR_BAR_LAYOUT)


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


def _part(m: Model, name: str) -> float:
    time = step_time.step_time(m)
    assert time is not None
    return time.parts.get(name, 0.0)


def test_an_exchange_sends_a_row_to_each_rank_over_both_kinds_of_links() -> None:
    """By hand: 2 bytes, 4 exchanges a layer, FINE's 24 layers, 8 micro-batches on a rank, 8 experts a token."""
    name, tokens = "communication: all-to-all of the experts", 8 * 4096
    over = {2: 1 / 2 / 330e9, 8: 7 / 8 / 330e9, 16: max(7 / 16 / 330e9, 8 / 16 / 40e9)}
    for ranks, seconds in over.items():
        m = _with(FINE, gpus=ranks, expert_model_parallel_size=ranks, global_batch_size=64 * ranks)
        held = 128 // ranks
        reached = ranks * (1 - math.comb(128 - held, 8) / math.comb(128, 8))  # ranks with an expert of a token
        late = 36e-6 if ranks == 16 else 18e-6
        assert _part(m, name) == pytest.approx(1e3 * 8 * 24 * 4 * (tokens * reached * 768 * 2 * seconds + late))


def test_full_recomputation_repeats_what_forward_sends() -> None:
    """By hand: 2 more exchanges beside 4, and 2 more sums of hidden states beside 4. Gradients are sent once."""
    m = _with(FINE, gpus=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, global_batch_size=64)
    again = _with(m, recompute_granularity="full")
    for name in ("communication: all-to-all of the experts", "communication: tensor parallelism"):
        assert 0 < _part(m, name) == pytest.approx(_part(again, name) * 4 / 6)
    name = "communication: gradients over data-parallel ranks"
    assert 0 < _part(m, name) == _part(again, name)
    # 4 micro-batches of 8 · 4096 tokens, 24 layers; each sum of 768 · 2 bytes goes twice over half of the ring.
    both_ways = 2 * (8 * 4096 * 768 * 2 / 2 / 330e9 + 18e-6)
    assert _part(again, "communication: tensor parallelism") == pytest.approx(1e3 * 4 * 24 * 6 * both_ways)


def test_links_give_the_measured_exchanges() -> None:
    records = json.loads((RESULTS / "expert_parallel.json").read_text())["records"]
    alone = [one for one in records if one["alone"]]
    assert len(alone) == 3
    for one in alone:
        planned = step_time.HOST_US / 1e3 + one["sent_mb"] / step_time.HOST_GB
        assert planned == pytest.approx((one["dispatch"] + one["combine"]) / 2, rel=0.02)


def test_symmetric_memory_has_a_place_for_every_token() -> None:
    """By hand: dMoE-Small on two GPUs, top-1, 65,536 tokens a rank. docs/parallelism.md says when it is taken."""
    two = _with(SMALL, gpus=2, expert_model_parallel_size=2, micro_batch_size=64)
    apart = _with(two, dispatcher="all_to_all")
    assert two.symmetric and not apart.symmetric and not SMALL.symmetric
    assert not _with(two, gpus=4, expert_model_parallel_size=4, global_batch_size=None).symmetric
    assert not _with(two, dispatch_rows_factor=1.5).symmetric
    tokens = 65536
    both = tokens * 12 * 2  # layers, bytes
    name = "activations: experts"
    assert memory.memory(apart).parts[name] == both * (2 * 768 + 3072)
    assert memory.memory(two).parts[name] == both * (3 * 768 + 2 * 3072)
    buffer = memory.memory(two).outside["symmetric memory"]
    assert buffer == 2 * 2 * tokens * (768 * 2 + 8) and "symmetric memory" not in memory.memory(apart).outside


def test_rings_over_hosts_share_adapters() -> None:
    name, late = "communication: gradients over data-parallel ranks", 2 * 0.036  # two sums
    many = _with(FINE, gpus=64, global_batch_size=512)
    p = memory.parameters(many)
    assert _part(many, name) == pytest.approx(8 * p.per_gpu * 63 / 64 / 320e9 * 1e3 + late)
    p = memory.parameters(apart := _with(many, expert_model_parallel_size=8))
    dense, experts = 8 * p.dense_per_gpu * 63 / 64 / 320e9, 8 * p.experts_per_gpu * 7 / 8 / 40e9
    assert _part(apart, name) == pytest.approx((dense + experts) * 1e3 + late)
    sharded = _with(many, use_distributed_optimizer=True)
    assert _part(sharded, name) - late == pytest.approx((_part(many, name) - late) * 6 / 8)


def test_a_rank_updates_all_of_its_experts_where_no_other_has_them() -> None:
    m = _with(FINE, gpus=8, expert_model_parallel_size=8, global_batch_size=256, use_distributed_optimizer=True)
    p, bandwidth = memory.parameters(m), 4.8e12
    moved = 30 * (p.dense_per_gpu / 8 + p.experts_per_gpu)
    assert _part(m, "optimizer") == pytest.approx(step_time.TIMES["optimizer"] * 1e3 * moved / bandwidth)
    state = memory.OPTIMIZER_BYTES[True] * (p.dense_per_gpu / 8 + p.experts_per_gpu)
    assert memory.memory(m).parts["optimizer state"] == pytest.approx(state)


def test_the_fullest_rank_and_the_last_stage_are_waited_for() -> None:
    m = _with(FINE, gpus=8, expert_model_parallel_size=4, pipeline_model_parallel_size=2, global_batch_size=256)
    time = step_time.step_time(m, 1.5)
    assert time is not None
    parts = time.parts
    busy = parts["experts"] + parts["communication: all-to-all of the experts"]
    assert parts["waiting for the fullest rank"] == pytest.approx(busy / 2)
    assert parts["waiting for the last stage"] == parts["embedding and loss"]
    once = (
        "optimizer", "gradients", "communication: gradients over data-parallel ranks", "waiting for other ranks"
    )  # fmt: skip
    each = sum(ms for name, ms in parts.items() if name not in (*once, "communication: pipeline bubble"))
    assert parts["communication: pipeline bubble"] == pytest.approx(each / m.micro_batches)


@pytest.mark.parametrize("experts", [4, 10**12])
def test_absurd_sizes_get_an_answer_at_once(experts: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What to change is looked for among few values: a micro-batch of 10¹² sequences has as many smaller ones."""
    words = [*FLAGS[:-1], str(10**12), "--gpus", str(10**12), "--num-experts", str(experts)]
    assert main(["plan", *words]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(("layers", "code"), [(10**12, 1), (2**63, 2)])
def test_absurd_numbers_of_the_drivers_layers_get_an_answer_at_once(
    layers: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.training")
    assert main(["plan", "--", *DRIVER_FLAGS, "--num-experts", "4", "--num-layers", str(layers)]) == code
    out, err = capsys.readouterr()
    assert "does not fit" in out if code == 1 else err.startswith(f"megablocks plan: num_layers={layers}: must be ")


def test_many_choices_among_many_experts_get_an_answer_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus 8 --expert-model-parallel-size 8 --num-experts 1000000 --moe-router-topk 400000".split()
    assert main(["plan", *FLAGS, *words]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(2, 2, 1), (64, 8, 6), (128, 128, 8), (16384, 8, 4000), (8, 1, 2)])
def test_ranks_of_a_token_by_counting_choices(sizes: tuple[int, int, int]) -> None:
    experts, ranks, top_k = sizes
    every, missing = math.comb(experts, top_k), math.comb(experts - experts // ranks, top_k)
    assert memory.reached(*sizes) == pytest.approx((every - missing) / every, rel=1e-9)


def test_a_field_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="num_layers=0: must be >= 1"):
        _with(num_layers=0)
    with pytest.raises(ConfigError, match="must divide num_layers=12"):
        _with(gpus=5, pipeline_model_parallel_size=5, global_batch_size=None)
    with pytest.raises(ConfigError, match="expert_model_parallel_size=5: must divide num_experts=64"):
        _with(gpus=5, expert_model_parallel_size=5, global_batch_size=None)
