"""S4: a captured training step equals the eager one.

    python -m pytest tests/gpu/test_cuda_graph.py

Each case is one or two runs of the driver, eager and captured, which print every step's loss, gradient norm and loss
scale to the last bit. So that eager runs repeat their bits, the exact cases use Megatron's own attention.
"""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytestmark = pytest.mark.gpu

PROGRAM = """
import functools
import hashlib
import json
import os
import sys
import torch
import torch.distributed as dist
from megablocks.megatron import pretrain_gpt
import megatron.training.training as training

rows, seen, step = [], {}, training.train_step
poison, same_data = int(os.environ.get("POISON", 0)), os.environ.get("SAME_DATA") == "1"

class Again:
    def __init__(self, iterator):
        self.batch = next(iterator)
    def __iter__(self):
        return self
    def __next__(self):
        return self.batch

@functools.wraps(step)
def watched(forward, data, model, optimizer, *args, **kwargs):
    if same_data and "data" not in seen:
        seen["data"] = Again(data)
    if poison and len(rows) + 1 == poison:
        with torch.no_grad():
            next(p for name, p in model[0].named_parameters() if "layers.1." in name).fill_(float("nan"))
    result = step(forward, seen.get("data", data), model, optimizer, *args, **kwargs)
    seen["model"], norm = model, result[5]
    scale = optimizer.get_loss_scale()
    numbers = [result[0].get("lm loss"), norm, scale]
    rows.append([float("nan") if n is None else float(n) for n in numbers])
    return result

training.train_step = watched
code = pretrain_gpt.main()
if code == 0:
    digest = hashlib.sha256()
    for p in seen["model"][0].parameters():
        digest.update(p.detach().view(torch.uint8).cpu().numpy().tobytes())
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps({"rows": [[n.hex() for n in row] for row in rows], "weights": digest.hexdigest()}))
sys.exit(code)
"""
DRIVER = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 2 --hidden-size 128 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 14 --lr 2e-3 --min-lr 2e-5 --lr-decay-iters 14 --lr-warmup-iters 4 "
    "--log-interval 2 --eval-interval 3 --eval-iters 2"
).split()
EXACT = "--megablocks-attention megatron --hidden-dropout 0 --attention-dropout 0".split()
EXPERTS = "--moe-num-experts 8 --moe-top-k 2 --moe-loss-weight 0.1 --moe-zloss-weight 0.001".split()
GRAPH = ["--cuda-graph-impl", "full_iteration"]


def run(*flags, ranks=1, **variables):
    """Its exit status and what it printed. A run that hangs is aborted, and prints the stack of each of its threads."""
    launcher = [sys.executable, "-X", "faulthandler"]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        launcher += [sys.executable, "-X", "faulthandler"]
    child = subprocess.Popen(
        [*launcher, "-c", PROGRAM, *DRIVER, *flags], env={**os.environ, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        try:
            child.wait(timeout=30)
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # what it started may hold the pipe open
        said, _ = child.communicate()
    return child.returncode, said


def results(said):
    """[(loss, gradient norm, loss scale)] of the steps, and a digest of the last weights."""
    found = json.loads(re.search(r"RESULT (.*)", said)[1])
    return [[float.fromhex(n) for n in row] for row in found["rows"]], found["weights"]


def logged(said):
    """The log's lines of training and validation, without times."""
    lines = [line for line in said.splitlines() if "lm loss" in line]
    timed = r"\[20[^]]*\]|elapsed time[^|]*\||tokens/s[^|]*\||MFU[^|]*\||throughput[^|]*\|"
    return [re.sub(timed, "", line) for line in lines]


def captured(said):
    return re.findall(r"CUDA graph: captured at (\w+) step (\d+)", said)


def trained(*flags, **options):
    status, said = run(*flags, **options)
    assert status == 0, said[-6000:]
    return said


def all_trained(*runs, **options):
    """What each of these runs printed. They share the GPU."""
    pytest.importorskip("megatron.training")
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(lambda flags: trained(*flags, **options), runs))


CASES = {
    "dense": ["--bf16", *EXACT],
    "experts": ["--bf16", *EXACT, *EXPERTS],
    "fused experts, distributed optimizer": [
        "--bf16", *EXACT, *EXPERTS, "--swiglu", "--megablocks-mlp-impl", "fused", "--use-distributed-optimizer",
    ],
    "global loss, expert bias": [
        "--bf16", *EXACT, "--num-experts", "8", "--moe-router-topk", "2", "--moe-router-load-balancing-type",
        "global_aux_loss", "--moe-aux-loss-coeff", "0.01", "--moe-router-score-function", "sigmoid",
        "--moe-router-enable-expert-bias",
    ],
    "capacity, torch's optimizer": [
        "--bf16", *EXACT, *EXPERTS, "--moe-capacity-factor", "1", "--no-megablocks-fused-optimizer",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_S4_captured_steps_equal_eager_ones_bit_for_bit(name):
    """14 steps of 4 micro-batches, with other data and another learning rate in each; losses, norms, log, weights."""
    eager, graph = all_trained(CASES[name], [*CASES[name], *GRAPH])
    assert captured(graph) == [("training", "4"), ("validation", "4")] and not captured(eager)
    rows, weights = results(eager)
    assert results(graph) == (rows, weights)
    assert len({loss for loss, *_ in rows}) == 14
    assert logged(graph) == logged(eager) and len(logged(graph)) >= 7 + 4


def test_S4_a_loss_scale_that_changes_is_followed():
    """fp16 starts with a scale that overflows, halves it at each overflow, and doubles it after two good steps."""
    flags = "--fp16 --initial-loss-scale 4294967296 --loss-scale-window 2 --hysteresis 1 --train-iters 40".split()
    flags += [*EXACT, *EXPERTS, "--lr-decay-iters", "40", "--eval-iters", "0"]
    eager, graph = all_trained(flags, [*flags, *GRAPH])
    assert captured(graph) == [("training", "4")]
    scales = [scale for *_, scale in results(graph)[0]]
    assert len(set(scales[4:])) >= 4, scales
    assert str(results(graph)) == str(results(eager))  # the norm of a skipped step is NaN, which equals nothing


def test_S4_each_replay_draws_new_random_numbers():
    """The same data and a learning rate of nothing, so that only dropout changes the loss."""
    still = "--bf16 --lr 1e-30 --min-lr 1e-30 --eval-iters 0".split()
    # dropout of hidden states and of attention draw from two generators
    draws = {"both": "0.1 0.1", "hidden": "0.1 0", "attention": "0 0.1", "none": "0 0"}
    flags = [["--hidden-dropout", h, "--attention-dropout", a] for h, a in map(str.split, draws.values())]
    runs = [[*still, *EXPERTS, *GRAPH, *one] for one in flags] + [[*still, *GRAPH, *flags[0]]]
    for name, said in zip([*draws, "dense"], all_trained(*runs, SAME_DATA="1"), strict=True):
        losses = [loss for loss, *_ in results(said)[0]]
        assert captured(said) == [("training", "4")] and all(4 < loss < 9 for loss in losses), name
        assert len(set(losses)) == (1 if name == "none" else len(losses)), f"{name}: {losses}"


def test_S4_dropout_and_torchs_attention_train_alike():
    """Both runs draw the same numbers. torch's attention does not repeat its bits in backward."""
    flags = ["--bf16", *EXPERTS, "--eval-iters", "0"]
    (eager, _), (graph, _) = map(results, all_trained(flags, [*flags, *GRAPH]))
    assert [row[0] for row in graph] == pytest.approx([row[0] for row in eager], rel=2e-3)


def test_S4_the_guard_sees_a_replayed_step():
    pytest.importorskip("megatron.training")
    status, said = run("--bf16", *EXPERTS, *GRAPH, "--eval-iters", "0", POISON="9")
    assert status == 1 and captured(said) == [("training", "4")], said[-4000:]
    assert "step 9: NaN or Inf on rank 0 in the output of layer 2: stopped" in said, said[-4000:]


def test_S4_runs_resume_with_and_without_graphs(tmp_path):
    """The random states in a captured run's checkpoint are those of every run."""
    flags = ["--bf16", *EXPERTS, "--megablocks-attention", "megatron", "--eval-iters", "0"]
    load, saves = ["--load", str(tmp_path)], ["--save", str(tmp_path), "--save-interval", "7", "--exit-interval", "7"]
    whole, first = all_trained([*flags, *GRAPH], [*flags, *GRAPH, *load, *saves])
    (rows, weights), (before, _) = results(whole), results(first)
    assert before == rows[:7]
    for resumed in all_trained([*flags, *GRAPH, *load], [*flags, *load]):
        assert results(resumed) == (rows[7:], weights)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "flags",
    [
        ["--use-distributed-optimizer"],
        ["--overlap-grad-reduce"],
        ["--moe-expert-model-parallelism", "--megablocks-dispatcher", "symmetric"],
    ],
    ids=["distributed optimizer", "overlapped reduction", "experts on two GPUs"],
)
def test_S4_two_gpus_replay_what_they_run_eagerly(flags):
    flags = ["--bf16", *EXACT, *EXPERTS, *flags]
    (eager,), (graph,) = all_trained(flags, ranks=2), all_trained([*flags, *GRAPH], ranks=2)
    assert captured(graph) == [("training", "4"), ("validation", "4")]
    assert results(graph) == results(eager) and logged(graph) == logged(eager)
