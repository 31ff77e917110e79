"""The whole-layer benchmarks at toy size on a CPU, their summaries, and their plots."""

import contextlib
import importlib.util
import io
import json
import math
import subprocess
import sys
from unittest import mock

import pytest
import torch

from megablocks import MoEConfig
from megablocks.moe.router import TopKRouter
from megablocks.testing.routings import steer

from .conftest import BENCHMARKS

measure = importlib.import_module("measure")
peers = importlib.import_module("peers")
plot = importlib.import_module("plot")
candidates = importlib.import_module("layer_candidates")
growth = importlib.import_module("growth")
token_rounding = importlib.import_module("token_rounding")
mlp_impls = importlib.import_module("mlp_impls")

# by its path, because a folder of tests is also called `layers`
spec = importlib.util.spec_from_file_location("layers_benchmark", BENCHMARKS / "layers.py")
layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are for the CPU")


def child_records(module, *flags):
    """Run a child of the benchmark in this process. Returns the records that it prints."""
    said = io.StringIO()
    with mock.patch.object(sys, "argv", ["benchmark", "--rounds", "2", *flags]), contextlib.redirect_stdout(said):
        module.main()
    return [json.loads(line) for line in said.getvalue().splitlines()]


def finish(module, name, said, path):
    """Do the parent's work: gate, summary and file."""
    gate = measure.Gate(lambda key: True)
    records = [r for r in said if not gate.take(r) and not {"job", "start", "finished"} & set(r)]
    summary = module.summarise(records, gate)
    measure.write_result(path, name, gate=gate, summary=summary, records=records)
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files layers.json with two skews, and peers.json."""
    folder = tmp_path_factory.mktemp("results")
    chosen = "padded,padded known,auto,sparse,grouped"
    layers_said = child_records(layers, "--child", "toy/1,toy/2", "--candidates", chosen)
    peers_said = child_records(peers, "--child", "0", "--toy")
    return (
        finish(layers, "layers", layers_said, folder / "layers.json"),
        finish(peers, "peers", peers_said, folder / "peers.json"),
    )


def test_layers_are_right_and_have_the_given_loads(results):
    result = measure.read_result(results[0])
    assert result["gate"]["green"] and 0 < result["gate"]["largest_error"] < 2e-2
    even, skewed = result["records"]
    assert (even["skew"], even["fullest"], even["least"]) == (1.0, 32, 32)
    assert (skewed["skew"], skewed["fullest"]) == (2.0, 64) and skewed["least"] > 0
    assert {"eager/auto", "forward/sparse", "one thread/auto", "eager/padded known"} <= set(skewed["times"])
    assert all(len(times) == 2 and min(times) > 0 for times in skewed["times"].values())
    summary = result["summary"]
    case = summary["sizes"]["toy"]["skews"][1]["candidates"]
    assert case["padded"]["speed"] == 1.0 and case["auto"]["speed"] == pytest.approx(
        measure.speed(skewed["times"], "eager/auto", "eager/padded")
    )
    assert case["auto"]["one_thread_speed"] > 0 and case["padded"]["one_thread_speed"] == 1.0
    assert case["auto"]["graph_speed"] is None  # there are no graphs on a CPU
    assert 1 < min(summary["trained_skews"]) < max(summary["trained_skews"]) < 4


def test_peers_compute_the_same_layer(results):
    result = measure.read_result(results[1])
    assert result["gate"]["green"] and not result["void"]
    rows = result["summary"]["shapes"][peers.TOY]
    assert {"auto", "grouped", "torch", "bmm", "fused", "fused recompute", "fused 8 bits"} <= set(rows)
    assert rows["auto"]["auto_speed"] == 1.0 and rows["auto"]["total"] > 0


def test_peers_under_skew_have_the_load_and_a_name_that_says_so():
    problem, _ = peers.load(peers.TOY, ("fused",), 2.0)
    loads = torch.bincount(problem.ids.flatten(), minlength=8)
    assert (int(loads.max()), int(loads.sum())) == (32, 128)
    said = child_records(peers, "--child", "0", "--toy", "--skew", "2", "--candidates", "fused")
    assert [r["shape"] for r in said if "shape" in r] == [f"{peers.TOY}, skew 2"]
    found = peers.compare([against(f"{peers.PAPER[0]}, skew 16", 2.0, 3.0, 2.5)])
    assert found["mean"] == pytest.approx(1.25)


@pytest.mark.parametrize("skew", ["0.5", "5", "nan"])
def test_peers_refuse_a_skew_that_no_load_has(skew, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers.py", "--toy", "--skew", skew])
    with pytest.raises(SystemExit):
        peers.main()
    assert f"--skew={skew}: must be in [1, 4], E / K of these shapes" in capsys.readouterr().err


def test_the_time_of_backward_is_total_minus_forward():
    record = {"flops": 1e12, "times": {"queued/a": [3e3, 3e3], "forward/a": [1e3, 1e3], "eager/a": [6e3, 6e3]}}
    assert peers.rates(record) == {"a": {"forward": 1e3, "backward": 1e3, "total": 1e3, "eager": 500.0}}


def test_labels_name_their_shapes():
    shapes = peers.labels(toy=False)
    assert len(peers.PAPER) == len(set(peers.PAPER)) == 12 and len(shapes) == len(set(shapes)) == 13
    assert set(measure.peer_figures()["shapes"]) <= set(shapes)
    for label in shapes:
        assert peers.labelled(label).label == label
    shape = peers.labelled("40960,768; 256/128/8")
    assert shape.forward_flops == 6 * 40960 * 768 * 256 * 8


def against(shape, fused, eager, compiled, held=(1, 2)):
    """A record of one round with the µs of fused and of SonicMoE's two candidates."""
    times = {"queued/fused": [fused], "queued/sonicmoe": [eager], "queued/sonicmoe compiled": [compiled]}
    times |= {name.replace("queued", how): values for name, values in times.items() for how in ("eager", "forward")}
    memory = {"fused": {"held": held[0]}, "sonicmoe": {"held": held[1]}, "sonicmoe compiled": {"held": held[1] + 1}}
    return {"shape": shape, "flops": 1e9, "times": times, "memory": memory}


def test_fused_is_compared_with_the_better_sonicmoe_candidate(capsys):
    found = peers.against_sonicmoe(against("S", 2.0, 3.0, 2.5))
    assert found == {"queued": 1.25, "eager": 1.25, "held, fused": 0.5}
    first, second = (against(shape, 1.0, speed, 9.0) for shape, speed in zip(peers.PAPER[:2], (1.0, 4.0), strict=True))
    summary = peers.compare([first, second, against("no paper's", 1.0, 99.0, 99.0)])
    assert set(summary["shapes"]) == set(peers.PAPER[:2])
    assert summary["mean"] == pytest.approx(2.0) and summary["least"] == 1.0
    assert "2 of 12 shapes" in capsys.readouterr().out
    assert peers.compare([{"shape": peers.PAPER[0], "times": {"queued/fused": [1.0]}, "memory": {}}]) == {}


def test_merged_runs_stay_red_or_void(tmp_path):
    def run(date, gpu="NVIDIA H200", void=(), failures=None, red=(), versions=(), **times):
        gate = {"green": not red, "largest_error": 1e-3, "red": list(red), "failures": failures or {}}
        records = [{"shape": shape, "t": t} for shape, t in times.items()]
        environment = {"gpu": gpu, "date": date, "commit": "0123abc", "scattermoe": None, **dict(versions)}
        return {"environment": environment, "gate": gate, "void": list(void), "records": records}

    late, early = run("2", A=2, B=2), run("1", A=1, C=1, failures={"0/torch": "x"})
    one = peers.merged({"late": late, "early": early})
    assert {r["shape"]: r["t"] for r in one["records"]} == {"A": 2, "B": 2, "C": 1}
    assert one["gate"].green and not one["gate"].void and one["environment"] == late["environment"]
    assert one["gate"].to_dict()["failures"] == {"early: 0/torch": "x"}
    assert peers.merged({"late": late, "early": run("1", red=["0/fused"], A=1)})["gate"].red == ["early: 0/fused"]
    assert peers.merged({"late": late, "early": run("1", void=["sonicmoe"], A=1)})["gate"].void == ["sonicmoe"]
    # only one of the runs had ScatterMoE installed
    one = peers.merged({"late": late, "early": run("1", versions={"scattermoe": "1.0", "processor": "x"}, A=1)})
    assert one["environment"]["scattermoe"] == "1.0"


@pytest.mark.parametrize(
    "change", [{"gpu": None}, {"gpu": "NVIDIA H100"}, {"commit": "4567def"}, {"commit": None}, {"torch": "2.12"}]
)
def test_runs_of_different_code_or_machines_are_not_merged(change, tmp_path, monkeypatch):
    of_all = {"gpu": "NVIDIA H200", "commit": "0123abc", "torch": "2.11"}
    gate = {"green": True, "largest_error": 1e-3, "red": [], "failures": {}}
    for name, of_one in (("a", {}), ("b", {}), ("odd", change)):
        result = dict.fromkeys(measure.REQUIRED, []) | {"format": measure.FORMAT, "gate": gate}
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"environment": {**of_all, **of_one}}))
    files = [str(tmp_path / f"{name}.json") for name in ("a", "b", "odd")]
    ((key, value),) = change.items()
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["peers.py", "--merge", *files, "--out", str(out)])
    with pytest.raises(SystemExit) as e:
        peers.main()
    assert e.value.code.startswith(
        f"peers.py: {key} is {value} in {files[2]} but {of_all[key]} in {files[0]}, {files[1]}: only runs of one commit"
    )
    assert not out.exists()


def test_waste_and_even_loads_of_token_rounding():
    assert token_rounding.wasted(torch.tensor([128, 1, 0, 255])) == pytest.approx(1 - 384 / 512)
    shape = token_rounding.labelled(next(iter(token_rounding.GOALS)))
    ids = token_rounding.even_ids(shape, "cpu")
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all() and (ids.flatten().bincount() == 256).all()


def test_growth_is_compared_with_its_model():
    shapes = [growth.labelled(label) for label in growth.SERIES["experts"]]
    base, bandwidth = 1000.0, growth.COPY_BYTES / 500.0  # a copy takes 500 µs
    more = (growth.weight_bytes(shapes[-1]) - growth.weight_bytes(shapes[0])) / bandwidth
    assert growth.weight_bytes(shapes[-1]) == 9 * 512 * 256 * 1536 * 2
    times = {f"graph/fused {shape.experts}": [base] for shape in shapes} | {"copy": [500.0]}
    record = {"series": "experts", "times": times, "tiles": {str(s.experts): 2048 for s in shapes}}
    record["tiles"]["512"] = 3072
    rows = growth.rows_of(record, "fused", toy=False)
    assert rows[-1]["predicted_us"] == pytest.approx(1.5 * base + more) and rows[0]["predicted_us"] == base
    # the first point is its own prediction and does not count
    assert growth.over_model(rows) == base / rows[1]["predicted_us"] - 1 < 0
    rows[-1]["graph_us"] = 1.2 * rows[-1]["predicted_us"]
    assert growth.over_model(rows) == pytest.approx(0.2)
    assert growth.over_model([*rows, {"graph_us": None}]) is None and growth.over_model(rows[:1]) is None

    flat = [{"tokens": t, "ns_per_token": ns} for t, ns in ((64, 90.0), (32768, 10.0), (65536, 9.2), (131072, 10.5))]
    assert growth.flatness(flat) == pytest.approx(0.08)
    assert growth.flatness([*flat, {"tokens": 262144, "ns_per_token": None}]) is None


@pytest.mark.parametrize("module,name,jobs", [(growth, "growth", "tokens,experts"),
                                              (token_rounding, "token_rounding", "0")])  # fmt: skip
def test_toy_runs_are_right(module, name, jobs, tmp_path):
    more = ["--rules", "nearest,balanced"] if module is token_rounding else []
    said = child_records(module, "--toy", "--child", jobs, *more)
    gate = measure.Gate(lambda key: True)
    records = [r for r in said if not gate.take(r) and not {"job", "start", "finished"} & set(r)]
    assert gate.green and len(gate.errors) == 4, gate.failures
    # through JSON, which makes the keys strings
    records = json.loads(json.dumps(records))
    if module is growth:
        summary = growth.summarise(records, gate, ["fused"], toy=True)
        rows = summary["curves"]["tokens"]["fused"]
        assert [row["tokens"] for row in rows] == [16, 64] and all(row["eager_us"] > 0 for row in rows)
        assert [r["experts"] for r in summary["curves"]["experts"]["fused"]] == [2, 8]
    else:
        rows = token_rounding.summarise(records, gate)["shapes"][token_rounding.TOY]
        assert rows["plain"]["wasted"] > 0 == rows["plain"]["deviation"]
        assert rows["whole"]["wasted"] == 0 == rows["whole"]["deviation"]
        for rule in ("nearest", "balanced"):
            assert rows[rule]["wasted"] == 0 < rows[rule]["deviation"] <= 128 and rows[rule]["queued_speed"] > 0
        summary = {"shapes": {token_rounding.TOY: rows}}
    measure.write_result(tmp_path / "r.json", name, gate=gate, summary=summary, records=records)
    if module is growth:
        pytest.importorskip("matplotlib")
        assert plot.draw(tmp_path / "r.json").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"activation": "swiglu"}])
def test_impls_are_compared_with_float32(changes):
    case = mlp_impls.Case("toy", 96, 64, 128, 4, 2, **changes)
    x, dy = (torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).bfloat16() for _ in range(2))
    x.requires_grad_()
    truth = mlp_impls.truth_of(case, x, dy)
    assert truth["y"].dtype == truth["experts.w1"].dtype == torch.float32
    got = mlp_impls.step_of(mlp_impls.layer_of(case, "grouped", "cpu"), x, dy)()
    assert 1e-3 < mlp_impls.error_of(got, truth) < 1e-2  # the error of bf16
    for name in truth:
        with pytest.raises(ArithmeticError, match=f"^{name}: relative error"):
            mlp_impls.error_of(got | {name: got[name] * 1.1}, truth)
        with pytest.raises(ArithmeticError, match=f"^{name}: relative error"):
            mlp_impls.error_of(got | {name: got[name] * math.nan}, truth)


def test_no_speed_up_is_printed_if_a_candidate_is_wrong(capsys):
    gate = measure.Gate(lambda key: True)
    gate.take({"good": "XS/1/padded", "error": 1e-3})
    gate.take({"bad": "XS/1/auto", "why": "relative error 1.0e+00"})
    record = {"size": "XS", "skew": 1.0, "times": {"eager/padded": [1.0], "forward/padded": [1.0]}, "memory": {}}
    assert layers.summarise([record], gate) == {}
    printed = capsys.readouterr().out
    assert "RED, no speed-up" in printed and "×" not in printed


def test_an_error_in_any_gradient_is_found():
    problem = candidates.problem_of("toy/2")
    step = problem.layer(problem.config(mlp_impl="grouped"))
    assert problem.error(step, weights=True) < 2e-2
    for name in ("y", *problem.names):
        kept = problem.truth()[name]
        problem._truth[name] = kept * 1.1
        with pytest.raises(ArithmeticError, match=f"^{name}: relative error"):
            problem.error(step, weights=True)
        problem._truth[name] = kept


@pytest.mark.parametrize("name, said", [("none.json", "No such file"), ("bad.json", "not a whole JSON file")])
def test_a_file_that_cannot_be_drawn_is_one_line(name, said, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    command = [sys.executable, plot.__file__, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("plot: ") and done.stderr.count("\n") == 1
    assert said in done.stderr and name in done.stderr


def test_only_valid_results_are_plotted(results, tmp_path):
    pytest.importorskip("matplotlib")
    for path in results:
        picture = plot.draw(path)
        assert picture.suffix == ".png" and picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(results[1].read_text())
    void = tmp_path / "void.json"
    void.write_text(json.dumps({**result, "void": ["torch total at S"]}))
    with pytest.raises(ValueError, match="does not count.*torch total at S"):
        plot.draw(void)
    void.write_text(json.dumps({**result, "gate": {**result["gate"], "green": False}}))
    with pytest.raises(ValueError, match="gate is red"):
        plot.draw(void)
    void.write_text(json.dumps({**result, "benchmark": "other"}))
    with pytest.raises(ValueError, match="'other' has no plot"):
        plot.draw(void)


@pytest.mark.parametrize(
    "tokens, experts, top_k, skew", [(512, 64, 1, 8.0), (96, 4, 1, 1.5), (256, 16, 4, 2.0), (7, 1, 1, 1.0)]
)
def test_skewed_ids_have_the_given_skew(tokens, experts, top_k, skew):
    ids = candidates.skewed(tokens, experts, top_k, skew)
    assert ids.shape == (tokens, top_k) and all(len(set(row)) == top_k for row in ids.tolist())
    load = torch.bincount(ids.flatten(), minlength=experts)
    assert int(load.max()) == round(skew * tokens * top_k / experts) and load.sum() == tokens * top_k
    assert skew == 1 or int(load.min()) <= int(load.median()) < int(load.max())
    assert torch.equal(ids, candidates.skewed(tokens, experts, top_k, skew))
    assert skew == 1 or not torch.equal(ids, candidates.skewed(tokens, experts, top_k, skew, seed=1))


def test_an_impossible_skew_is_refused():
    for skew in (0.5, 4.5):
        with pytest.raises(ValueError, match=f"skew={skew}: .* in \\[1, 4\\]"):
            candidates.skewed(8, 4, 1, skew)


def test_a_steered_router_keeps_its_weights_and_gradient():
    router = TopKRouter(MoEConfig(hidden_size=8, ffn_hidden_size=8, num_experts=4))
    x, ids = torch.randn(6, 8), torch.tensor([[3], [0], [0], [2], [1], [3]])
    before = router.logits(x)
    steer(router, ids, strength=8.0)
    routing = router(x)
    assert torch.equal(routing.expert, ids.flatten().int())
    expected = (before + 8.0 * torch.nn.functional.one_hot(ids[:, 0], 4)).softmax(1).gather(1, ids)
    torch.testing.assert_close(routing.weight, expected.flatten())
    routing.weight.sum().backward()
    assert router.layer.weight.grad.abs().sum() > 0
