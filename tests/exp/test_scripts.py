"""L1, L5: each script of exp/ prints a command that the driver accepts, guards its run folder and port."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))  # last, because some scripts have the names of test folders
training_step = importlib.import_module("training_step")
# Those of the driver; test_dmoe_spec.py has the one that starts Megatron-LM's own script, test_paper.py the one that
# starts these scripts.
SCRIPTS = sorted(path for path in (ROOT / "exp").glob("*/*.sh") if path.parent.name not in ("megatron_lm", "paper"))
IDS = [str(path.relative_to(ROOT / "exp")) for path in SCRIPTS]

# The published settings: layers, hidden, heads, micro-batch, steps, learning rate, its end (megablocks 0.10, exp/).
SIZES = {"46m": (6, 512, 8), "125m": (12, 768, 12), "356m": (24, 1024, 16), "760m": (24, 1536, 16)}
SIZES["1315m"] = (24, 2048, 16)
BATCHES = {
    "dmoe_8gpu": {"46m": 64, "125m": 32, "356m": 16, "760m": 8},
    "moe_8gpu": {"46m": 64, "125m": 32, "356m": 8},
    "tutel_8gpu": {"46m": 32, "125m": 8, "356m": 1},
    "gpt2_1gpu": {"46m": 64, "125m": 32, "356m": 16, "760m": 16, "1315m": 8},
    "gpt2_8gpu": {"46m": 64, "125m": 64, "356m": 32, "760m": 32, "1315m": 16},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set, made as a user makes one."""
    out = tmp_path_factory.mktemp("data") / "set"
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--out", str(out), "--vocab-size", "600"]
    prepare += ["--max-bytes", "300000", "--valid-fraction", "0.3", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(prepare, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def _run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NGPU", "STEPS", "FLAGS", "DATA_PREFIX"):
        if name not in environment:
            variables.pop(name, None)
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def _dry(script: Path, *arguments: str, **environment: str) -> list[str]:
    done = _run(script, *arguments, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


def _flags(words: list[str]) -> dict[str, str | bool]:
    driver = words[words.index("megablocks.megatron.pretrain_gpt") + 1 :]
    found: dict[str, str | bool] = {}
    for i, word in enumerate(driver):
        if word.startswith("--"):
            follows = driver[i + 1] if i + 1 < len(driver) else "--"
            found[word] = True if follows.startswith("--") else follows
    return found


def _option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_L1_published_names_are_all_there() -> None:
    names = {f"{stem.split('_')[0]}/{stem.split('_')[0]}_{size}_{stem.split('_')[1]}.sh"
             for stem, sizes in BATCHES.items() for size in sizes}  # fmt: skip
    assert names | {"smoke/dmoe.sh", "dmoe/dmoe_fine_1gpu.sh"} == set(IDS)


def test_the_fine_grained_model_is_as_its_header_says() -> None:
    flags = _flags(_dry(ROOT / "exp/dmoe/dmoe_fine_1gpu.sh", "r"))
    sizes = ("num-layers", "hidden-size", "moe-ffn-hidden-size", "moe-num-experts", "moe-top-k", "seq-length")
    assert [flags[f"--{name}"] for name in sizes] == ["24", "768", "256", "128", "8", "4096"]
    assert {"--swiglu", "--disable-bias-linear", "--bf16"} <= set(flags)
    assert (flags["--normalization"], flags["--position-embedding-type"]) == ("RMSNorm", "rope")


@pytest.mark.parametrize("script", [path for path in SCRIPTS if "fine" not in path.name])
def test_L1_dry_run_prints_the_published_settings(script: Path) -> None:
    words = _dry(script, "runs/x", DATA_PREFIX="/data/set")
    flags = _flags(words)
    assert flags["--data-prefix"] == "/data/set"
    assert "set -euo pipefail" in script.read_text()
    if script.parent.name == "smoke":
        assert int(str(flags["--num-layers"])) >= 4 and int(str(flags["--seq-length"])) >= 256
        assert (flags["--hidden-size"], flags["--moe-num-experts"], flags["--moe-top-k"]) == ("256", "8", "2")
        return
    family, size, machine = script.stem.split("_")
    layers, hidden, heads = SIZES[size]
    assert (flags["--num-layers"], flags["--hidden-size"]) == (str(layers), str(hidden))
    assert flags["--num-attention-heads"] == str(heads)
    assert flags["--micro-batch-size"] == str(BATCHES[f"{family}_{machine}"][size])
    assert (flags["--global-batch-size"], flags["--seq-length"]) == ("512", "1024")
    assert (flags["--lr-decay-style"], flags["--lr-warmup-fraction"], flags["--clip-grad"]) == ("cosine", "0.01", "1.0")
    assert _option(words, "--nproc-per-node") == machine.removesuffix("gpu")
    slow = family == "moe" or machine == "1gpu"
    big = size in ("760m", "1315m")
    rates = ("1.5e-4", "1e-5") if slow else ("4e-4", "4e-5") if big else ("6e-4", "6e-5")
    assert (flags["--lr"], flags["--min-lr"]) == rates
    assert ("--fp16" in flags) == slow and ("--bf16" in flags) != slow
    assert flags["--train-iters"] == ("100000" if family == "gpt2" else "20000")
    assert flags.get("--init-method-std") == (None if size == "1315m" else "0.01")
    assert (flags.get("--moe-num-experts"), flags.get("--moe-loss-weight")) == (
        (None, None) if family == "gpt2" else ("64", "0.1")
    )


def test_L1_positional_arguments_and_environment_reach_the_command() -> None:
    dmoe = _flags(_dry(ROOT / "exp/dmoe/dmoe_46m_8gpu.sh", "r", "7", "16", "2", "0.5", "4", DATA_PREFIX="/d"))
    names = ("train-iters", "moe-num-experts", "moe-top-k", "moe-loss-weight", "micro-batch-size")
    assert [dmoe[f"--{n}"] for n in names] == ["7", "16", "2", "0.5", "4"]
    for family, lead in (("moe", []), ("tutel", ["--megablocks-layer"])):
        moe = _flags(_dry(ROOT / f"exp/{family}/{family}_46m_8gpu.sh", "r", "7", "16", "1.25", "2", "0.5", "4"))
        names = ("moe-num-experts", "moe-capacity-factor", "moe-top-k", "moe-loss-weight", "micro-batch-size")
        assert [moe[f"--{n}"] for n in names] == ["16", "1.25", "2", "0.5", "4"]
        assert all(flag in moe for flag in lead)
    words = _dry(ROOT / "exp/gpt2/gpt2_46m_8gpu.sh", "r", NGPU="3", STEPS="9", DATA_PREFIX="/d")
    assert _option(words, "--nproc-per-node") == "3" and _flags(words)["--train-iters"] == "9"
    assert "--standalone" in words
    for script in ("gpt2/gpt2_46m_8gpu.sh", "megatron_lm/dmoe_spec.sh"):
        for between in (" ", "\n    ", "\n\n"):  # several lines, as in a job's file
            words = _dry(ROOT / "exp" / script, "r", FLAGS=f"--log-interval 10{between}--no-bf16\n")
            assert words[-3:] == ["--log-interval", "10", "--no-bf16"]
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "6001"}
    words = _dry(ROOT / "exp/gpt2/gpt2_46m_8gpu.sh", "r", **several)
    assert [_option(words, name) for name in ("--nnodes", "--rdzv-endpoint")] == ["2", "host0:6001"]
    assert "is_host=false" in _option(words, "--rdzv-conf") and not {"--standalone", "--max-restarts"} & set(words)
    words = _dry(ROOT / "exp/gpt2/gpt2_46m_8gpu.sh", "r", **{**several, "NODE_RANK": "0"}, MAX_RESTARTS="2")
    assert "is_host=true" in _option(words, "--rdzv-conf") and _option(words, "--max-restarts") == "2"


PARSE = """
import json, os, sys
from megablocks.config import ConfigError
from megablocks.megatron.cpu import install
from megablocks.megatron.arguments import add_arguments
install()
from megatron.training.arguments import parse_args, validate_args
import quick_flags
quick_flags.remember_help()
verdicts = []
for world, argv in json.load(sys.stdin):
    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt", *argv]
    try:
        args = validate_args(parse_args(add_arguments), {})
        verdicts.append([args.num_experts, args.expert_model_parallel_size, args.padded_vocab_size])
    except (Exception, SystemExit) as error:
        verdicts.append(f"{type(error).__name__}: {error}")
print("VERDICTS", json.dumps(verdicts))
"""


def test_L1_the_driver_accepts_every_command(data: Path) -> None:
    """One process parses them all, each as if its whole world had been started."""
    cases = []
    for script in SCRIPTS:
        words = _dry(script, "runs/x", DATA_PREFIX=str(data))
        cases.append((int(_option(words, "--nproc-per-node")), words[words.index("-m", 3) + 2 :]))
    page = (ROOT / "docs/machines.md").read_text()
    for rank in ("0", "1"):  # two machines of eight GPUs
        line = rf"(?m)^    NNODES=2 NODE_RANK={rank} MASTER_ADDR=host0 MAX_RESTARTS=3 bash (\S+) (.+)$"
        ((script, arguments),) = re.findall(line, page)
        several = {"NNODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "host0", "DATA_PREFIX": str(data)}
        words = _dry(ROOT / script, *arguments.split(), **several)
        cases.append((16, words[words.index("megablocks.megatron.pretrain_gpt") + 1 :]))
    # The arms of the benchmark of steps, except those that need a GPU to be accepted.
    arms = {name: arm for name, arm in training_step.ARMS.items() if not arm.engine and "cuda-graph" not in arm.flags}
    for arm in arms.values():
        (_, script, *arguments), changes = training_step.command_of(arm, ROOT, data, Path("runs/x"))
        words = _dry(Path(script), *arguments, **changes)
        cases.append((arm.gpus, words[words.index("megablocks.megatron.pretrain_gpt") + 1 :]))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/reliability")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    parse, given = [sys.executable, "-c", PARSE], json.dumps(cases)
    done = subprocess.run(parse, input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VERDICTS ")]
    verdicts, names = json.loads(line.removeprefix("VERDICTS ")), [*IDS, "machine 0", "machine 1", *arms]
    for name, (world, _), verdict in zip(names, cases, verdicts, strict=True):
        assert isinstance(verdict, list), f"{name}: {verdict}"
        if name in arms:
            continue
        experts = None if name.startswith("gpt2") else {"smoke/dmoe.sh": 8, "dmoe/dmoe_fine_1gpu.sh": 128}.get(name, 64)
        assert verdict[:2] == [experts, world if experts else 1], name


@pytest.fixture
def recorder(tmp_path: Path) -> dict[str, str]:
    """A PYTHON that writes torchrun's command line to `ran` instead of starting it, and is real for everything else."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *--nproc-per-node*) printf "%q " "$@" > "{tmp_path}/ran";;\n'
        f'*) exec "{sys.executable}" "$@";; esac\n'
    )
    python.chmod(0o755)
    return {"PYTHON": str(python)}


SMOKE = ROOT / "exp/smoke/dmoe.sh"


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_L5_an_occupied_port_is_one_line(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", MASTER_PORT=port, **recorder)
        assert f"MASTER_PORT={port} cannot be opened (Address already in use)" in _refusal(done)
        assert not (tmp_path / "run").exists() and not (tmp_path / "ran").exists()
        # A machine that joins another's rendezvous does not open the port itself.
        joins = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": port}
        done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", **joins, **recorder)
        assert done.returncode == 0, done.stderr
    done = _run(SMOKE, str(tmp_path / "free"), DATA_PREFIX=str(data), NGPU="1", MASTER_PORT=port, **recorder)
    assert done.returncode == 0, done.stderr


def test_L5_a_failed_run_ends_with_the_drivers_own_line(data: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\ncase "$*" in *--nproc-per-node*) echo "pretrain_gpt: lr=-1: must be > 0" >&2\n'
        f'echo "Traceback: noise" >&2; exit 1;; *) exec "{sys.executable}" "$@";; esac\n'
    )
    python.chmod(0o755)
    done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", PYTHON=str(python))
    assert done.returncode == 1
    assert done.stderr == "dmoe.sh: failed: pretrain_gpt: lr=-1: must be > 0\n"
    assert "Traceback: noise" in (tmp_path / "run/train.log").read_text()

    # A line that an earlier run left in the log is no reason of this one.
    (tmp_path / "run/checkpoints/iter_0000002").mkdir(parents=True)
    python.write_text(python.read_text().replace("pretrain_gpt: lr", "killed: lr"))
    done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", PYTHON=str(python))
    assert (done.returncode, done.stderr) == (1, f"dmoe.sh: failed: see {tmp_path}/run/train.log\n")


def test_L5_several_machines_need_an_address(data: Path, tmp_path: Path) -> None:
    done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", NNODES="2")
    assert "MASTER_ADDR is unset" in _refusal(done)


def test_L5_a_missing_data_set_is_one_line(tmp_path: Path, recorder: dict[str, str]) -> None:
    nowhere = tmp_path / "nowhere"
    script = ROOT / "exp/gpt2/gpt2_46m_1gpu.sh"
    done = _run(script, str(tmp_path / "run"), DATA_PREFIX=str(nowhere), NGPU="1", **recorder)
    assert f"DATA_PREFIX={nowhere} holds no manifest.json" in _refusal(done)


def test_a_mistyped_data_prefix_is_not_made(tmp_path: Path, recorder: dict[str, str]) -> None:
    """The smoke run makes data/stdlib, and no other folder."""
    nowhere = tmp_path / "nowhere"
    done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(nowhere), NGPU="1", **recorder)
    assert f"DATA_PREFIX={nowhere} holds no manifest.json: correct it or make it" in _refusal(done)
    assert not nowhere.exists() and not (tmp_path / "run").exists()


def test_only_the_default_data_is_made(tmp_path: Path) -> None:
    """In a copy of the checkout, with a stand-in for prepare_data.py and torchrun.py."""
    for name in ("exp", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python, stdlib = tmp_path / "python", tmp_path / "data/stdlib"
    python.write_text(
        '#!/bin/bash\ncase "$*" in *prepare_data.py*) mkdir -p "${@: -1}"; touch "${@: -1}/manifest.json" ;;\n'
        f'*--nproc-per-node*) echo "$@" ;; *) exec "{sys.executable}" "$@" ;; esac\n'
    )
    python.chmod(0o755)
    smoke = tmp_path / "exp/smoke/dmoe.sh"
    assert "NGPU=no: must be" in _refusal(_run(smoke, str(tmp_path / "run"), PYTHON=str(python), NGPU="no"))
    assert not stdlib.exists()
    done = _run(smoke, str(tmp_path / "run"), PYTHON=str(python), NGPU="1")
    assert done.returncode == 0 and f"--data-prefix {stdlib} " in done.stdout, done.stderr
    assert (stdlib / "manifest.json").exists()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("NGPU", "0", "1 to 1024"),
        ("NGPU", "abc", "1 to 1024"),
        ("NGPU", "-1", "1 to 1024"),
        ("NGPU", "1.5", "1 to 1024"),
        ("NGPU", "99999999999999999999", "1 to 1024"),
        ("STEPS", "many", "1 to 999999999"),
        ("MASTER_PORT", "abc", "1 to 65535"),
        ("MASTER_PORT", "99999", "1 to 65535"),
        ("NNODES", "two", "1 to 65536"),
        ("NNODES", "0", "1 to 65536"),
        ("MAX_RESTARTS", "often", "0 to 1000"),
    ],
)
def test_a_setting_that_is_no_whole_number_of_its_range_is_one_line(
    data: Path, tmp_path: Path, recorder: dict[str, str], field: str, value: str, allowed: str
) -> None:
    settings = {"DATA_PREFIX": str(data), "NGPU": "1", **recorder, field: value}
    done = _run(SMOKE, str(tmp_path / "run"), **settings)
    assert _refusal(done) == f"dmoe.sh: {field}={value}: must be a whole number from {allowed}\n"
    assert not (tmp_path / "run").exists() and not (tmp_path / "ran").exists()


def test_a_wrong_call_is_one_line_and_help_starts_nothing(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    settings = {"DATA_PREFIX": str(data), "NGPU": "1", **recorder}
    usage, run = "usage: dmoe.sh [EXP_DIR [STEPS]]", str(tmp_path / "run")
    for words, message in (
        ([run, "3", "64"], f"{run} 3 64: too many arguments; {usage}"),
        ([run, "3", "--bf16"], f"{run} 3 --bf16: holds a flag, which belongs in FLAGS; {usage}"),
        (["-n"], f"-n: holds a flag, which belongs in FLAGS; {usage}"),
    ):
        assert _refusal(_run(SMOKE, *words, **settings)) == f"dmoe.sh: {message}\n"
    assert _refusal(_run(SMOKE, run, DRY_RUN="yes", **settings)) == "dmoe.sh: DRY_RUN=yes: must be 0 or 1\n"
    needs = _run(ROOT / "exp/gpt2/gpt2_46m_1gpu.sh", **settings)
    assert _refusal(needs) == "gpt2_46m_1gpu.sh: EXP_DIR is missing; usage: gpt2_46m_1gpu.sh EXP_DIR [STEPS]\n"
    helped = _run(SMOKE, "--help", **settings)
    assert helped.returncode == 0 and "\nUsage: dmoe.sh [EXP_DIR [STEPS]] " in helped.stdout and not helped.stderr
    assert not Path(run).exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "exp/paper/compare.sh", ROOT / "exp/megatron_lm/dmoe_spec.sh"])
def test_the_usage_line_names_every_argument_that_a_script_reads(script: Path) -> None:
    text = script.read_text()
    (usage,) = re.findall(r"^# Usage: (\S+) (.*?)(?:  .*)?$", text, re.MULTILINE)
    assert usage[0] == script.name
    read = max(map(int, re.findall(r"\$\{(\d)[:}]", text)), default=2)
    assert len(usage[1].split()) == read


def test_a_node_rank_outside_the_machines_is_one_line(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    settings = {"DATA_PREFIX": str(data), "NGPU": "1", "MASTER_ADDR": "localhost", **recorder}
    for nodes, rank, rule in (
        ("1", "1", "must be 0 because NNODES=1"),
        ("2", "2", "must be a whole number from 0 to 1"),
        ("2", "first", "must be a whole number from 0 to 1"),
    ):
        done = _run(SMOKE, str(tmp_path / "run"), NNODES=nodes, NODE_RANK=rank, **settings)
        assert _refusal(done) == f"dmoe.sh: NODE_RANK={rank}: {rule}\n"


def test_a_run_folder_that_cannot_be_made_or_written_is_one_line(
    data: Path, tmp_path: Path, recorder: dict[str, str]
) -> None:
    settings = {"DATA_PREFIX": str(data), "NGPU": "1", **recorder}
    (tmp_path / "file").write_text("precious")
    cases = [
        (tmp_path / "file", "is a file: choose another folder"),
        (tmp_path / "file/run", "cannot be made (Not a directory): choose another folder"),
        (Path("/proc/run"), "cannot be made (No such file or directory): choose another folder"),
    ]
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o555)
        cases.append((tmp_path / "closed", "cannot be written to: choose another folder"))
    for folder, reason in cases:
        assert _refusal(_run(SMOKE, str(folder), **settings)) == f"dmoe.sh: EXP_DIR={folder} {reason}\n"
    assert (tmp_path / "file").read_text() == "precious" and not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_no_part_of_a_command(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    settings = {"DATA_PREFIX": str(data), "NGPU": "1", **recorder}
    no_room = 'trap "" XFSZ; ulimit -f 0; exec bash "$@"'  # a stand-in: each write to a file fails
    done = _run("-c", no_room, "_", str(SMOKE), str(tmp_path / "run"), **settings)
    said = f"dmoe.sh: EXP_DIR={tmp_path}/run cannot be written to: make room or choose another folder\n"
    assert _refusal(done) == said and list((tmp_path / "run").iterdir()) == []
    assert _run(SMOKE, str(tmp_path / "run"), **settings).returncode == 0


def test_L5_an_existing_run_directory(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    run, ran = tmp_path / "run", tmp_path / "ran"
    launch = {"DATA_PREFIX": str(data), "NGPU": "1", **recorder}

    run.mkdir()
    (run / "train.log").touch()  # by another machine of the run, which may come first
    assert _run(SMOKE, str(run), "3", **launch).returncode == 0, "an empty folder is a fresh run"
    assert ran.read_text().count(f"--load {run}/checkpoints ") == 1, "ranks that torchrun starts again resume"
    command = (run / "command.txt").read_text()
    assert "--train-iters 3" in command.replace("'", "") and (run / "train.log").exists()

    assert "holds no checkpoint to resume from" in _refusal(_run(SMOKE, str(run), "3", **launch))
    assert _run(SMOKE, str(run), "3", MAX_RESTARTS="1", **launch).returncode == 0, "a job may die before its first save"
    (run / "checkpoints/iter_0000002").mkdir(parents=True)
    ran.unlink()
    assert _run(SMOKE, str(run), "3", **launch).returncode == 0, "the same command goes on"
    assert ran.read_text().endswith(f"--load {run}/checkpoints "), "also with another --load in FLAGS"
    assert (run / "command.txt").read_text() == command

    ran.unlink()
    assert "is no run of this command" in _refusal(_run(SMOKE, str(run), "4", **launch))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    assert "is no run of this command" in _refusal(_run(SMOKE, str(foreign), "3", **launch))
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"] and not ran.exists()


def test_a_run_goes_on_in_another_locale(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    """A job may have no locale, and bash quotes the ö by the locale."""
    run, settings = tmp_path / "größe 1", {"DATA_PREFIX": str(data), "NGPU": "1", **recorder}
    for locale in ("C.UTF-8", "C", "POSIX", "C.UTF-8"):
        done = _run(SMOKE, str(run), "3", LC_ALL=locale, **settings)
        assert (done.returncode, done.stderr) == (0, ""), locale
        (run / "checkpoints/iter_0000002").mkdir(parents=True, exist_ok=True)


TRAINING = """
import os, pathlib, signal, sys, time
here, asked = pathlib.Path({here!r}), []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, _: asked.append(number))
(here / "run/checkpoints/iter_0000002").mkdir(parents=True, exist_ok=True)
print("training", *sys.argv[1:], flush=True)
(here / "started").touch()
while signal.SIGTERM not in asked:
    time.sleep(0.05)
end = time.monotonic() + float((here / "seconds").read_text())
while time.monotonic() < end:
    time.sleep(0.05)
    if signal.SIGQUIT in asked:
        sys.exit("killed")
print("saved", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a late one would kill the interpreter while it ends
sys.exit(int((here / "status").read_text()))
"""


@pytest.fixture
def held(data: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str], dict[str, str]]]:
    """A run that holds its folder: its launcher, and the command and the environment of a second start.

    TRAINING stands in for torchrun.py: it waits for SIGTERM, saves for as many seconds as the file `seconds` says, and
    exits with the status of the file `status`.
    """
    ranks = tmp_path / "ranks"
    (tmp_path / "training.py").write_text(TRAINING.format(here=str(tmp_path)))
    ranks.write_text(
        f'#!/bin/bash\ncase "$*" in *--nproc-per-node*) exec "{sys.executable}" "{tmp_path}/training.py" "$@" ;;\n'
        f'*) exec "{sys.executable}" "$@" ;; esac\n'
    )
    ranks.chmod(0o755)
    (tmp_path / "seconds").write_text("0.5")
    (tmp_path / "status").write_text("0")
    environment = {**os.environ, "PYTHON": str(ranks), "DATA_PREFIX": str(data), "NGPU": "1"}
    command = ["bash", str(SMOKE), str(tmp_path / "run"), "3"]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": heed_signals}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, **options)
    try:
        _wait_for(tmp_path / "started", launcher)
        yield launcher, command, environment
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def heed_signals() -> None:
    """Within a new process: a background job of a shell ignores signals, and bash can trap none that it ignores."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait_for(path: Path, launcher: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


def test_a_second_run_in_one_folder_is_refused_while_the_first_lives(held, tmp_path: Path) -> None:
    launcher, command, environment = held
    second = {"env": environment, "capture_output": True, "text": True}
    while not (logged := (tmp_path / "run/train.log").read_text()):  # tee writes what the first run has printed
        assert launcher.poll() is None
        time.sleep(0.05)
    line = _refusal(subprocess.run(command, **second))
    assert line.startswith(f"dmoe.sh: EXP_DIR={tmp_path / 'run'} is in use by another run: choose another folder")
    assert (tmp_path / "run/train.log").read_text() == logged
    launcher.kill()
    launcher.wait()
    assert "is in use" in _refusal(subprocess.run(command, **second)), "its ranks still train"
    os.killpg(launcher.pid, signal.SIGKILL)
    (tmp_path / "started").unlink()
    after = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        _wait_for(tmp_path / "started", after)
    finally:
        os.killpg(after.pid, signal.SIGKILL)
        after.communicate()
    assert f"--load {tmp_path}/run/checkpoints" in (tmp_path / "run/train.log").read_text()


def test_a_file_system_without_locks_is_a_warning(data: Path, tmp_path: Path, recorder: dict[str, str]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flock").write_text('#!/bin/sh\necho "flock: $1: No locks available" >&2\nexit 71\n')
    (tmp_path / "bin/flock").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = _run(SMOKE, str(tmp_path / "run"), DATA_PREFIX=str(data), NGPU="1", PATH=path, **recorder)
    assert done.returncode == 0 and (tmp_path / "ran").exists(), done.stderr
    assert done.stderr == f"dmoe.sh: EXP_DIR={tmp_path}/run cannot be locked here: do not start a second run in it\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher", "group"])
def test_a_signal_to_the_launcher_is_a_saved_stop(held, tmp_path: Path, number: signal.Signals, whole_group) -> None:
    """A supervisor signals the launcher; a terminal (Ctrl-C) and timeout(1) signal its process group."""
    launcher, _, _ = held
    (os.killpg if whole_group else os.kill)(launcher.pid, number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(launcher.pid, number)  # timeout(1) sends it twice
    out, err = launcher.communicate()
    assert launcher.returncode == 0 and "saved\n" in out, err
    lines = err.splitlines()
    assert len(lines) == 2 and "stopping: every rank saves" in lines[0] and "stopped and saved" in lines[1], err
    assert "saved\n" in (tmp_path / "run/train.log").read_text()


def test_a_stop_does_not_promise_a_save_elsewhere(held, tmp_path: Path) -> None:
    """As with FLAGS=--save=, which turns saving off."""
    launcher, _, _ = held
    shutil.rmtree(tmp_path / "run/checkpoints")
    launcher.terminate()
    _, err = launcher.communicate()
    line = f"dmoe.sh: stopped: {tmp_path}/run holds no checkpoint, so it cannot resume; FLAGS give another --save"
    assert launcher.returncode == 0 and err.splitlines()[1:] == [line]


def test_a_stop_without_a_save_is_a_failure(held, tmp_path: Path) -> None:
    launcher, _, _ = held
    (tmp_path / "status").write_text("1")
    launcher.terminate()
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert err.splitlines()[-1] == f"dmoe.sh: stopped before a save: see {tmp_path}/run/train.log"


def test_a_second_signal_kills_the_ranks(held, tmp_path: Path) -> None:
    launcher, _, _ = held
    (tmp_path / "seconds").write_text("30")
    launcher.terminate()
    time.sleep(3.1)
    launcher.terminate()
    out, err = launcher.communicate()
    assert launcher.returncode == 1 and "killed\n" in out and "saved" not in out, err


def test_L1_docker_mounts_the_parent_folder() -> None:
    environment = {**os.environ, "DRY_RUN": "1"}
    docker = ["bash", str(ROOT / "docker.sh"), "make", "test"]
    done = subprocess.run(docker, env=environment, capture_output=True, text=True)
    words = shlex.split(done.stdout)
    assert words[:2] == ["docker", "run"] and words[-3:] == ["megablocks-dev", "make", "test"]
    assert _option(words, "-v") == f"{ROOT.parent}:/mount" and _option(words, "-w") == f"/mount/{ROOT.name}"
    assert "--ipc=host" in words and _option(words, "--gpus") == "all"


@pytest.mark.parametrize("terminal", [False, True])
def test_docker_gets_a_terminal_only_where_there_is_one(terminal: bool) -> None:
    """docker run -t fails if its input is not a terminal, as in a job or behind a pipe."""
    ends = os.openpty()
    environment = {**os.environ, "DRY_RUN": "1"}
    command = ["bash", str(ROOT / "docker.sh")]
    stdin = ends[1] if terminal else subprocess.DEVNULL
    done = subprocess.run(command, env=environment, stdin=stdin, capture_output=True, text=True, check=True)
    for end in ends:
        os.close(end)
    assert ("-it" if terminal else "-i") in shlex.split(done.stdout)


def test_L1_the_slurm_example_hands_each_machine_its_rank(tmp_path: Path) -> None:
    # The pause: a script that stops reading after the first name must not fail, however late the second comes.
    for name, text in (
        ("scontrol", "echo host0; sleep 0.1; echo host1"),
        ("srun", 'shift; exec env SLURM_NODEID=1 SLURMD_NODENAME=host1 "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_ID": "123456"}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1", **slurm}
    script = ["bash", str(ROOT / "scripts/slurm_dmoe.sh"), "/shared/run"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    names = ("--nnodes", "--rdzv-endpoint", "--rdzv-conf", "--local-addr", "--max-restarts")
    got = [_option(words, name) for name in names]
    assert got == ["2", "host0:23456", "is_host=false,join_timeout=600,read_timeout=600", "host1", "3"], done.stderr
    assert _flags(words)["--micro-batch-size"] == "32"
    del environment["SLURM_NNODES"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("SLURM_NNODES: is unset: submit this script with sbatch\n")


def test_test_command_dry_run() -> None:
    environment = {**os.environ, "DRY_RUN": "1"}
    script = ["bash", str(ROOT / "scripts/test.sh")]
    plain = subprocess.run([*script, "-k", "L1"], env=environment, capture_output=True, text=True, check=True).stdout
    assert plain.startswith("bash scripts/check.sh\npython -m pytest") and plain.endswith("-k L1\n")
    assert "slow" not in plain
    everything = subprocess.run([*script, "--all"], env=environment, capture_output=True, text=True, check=True).stdout
    assert shlex.split(everything)[-2:] == ["-m", "slow or not slow"]
    gpu = subprocess.run([*script, "--gpu", "-x"], env=environment, capture_output=True, text=True, check=True).stdout
    assert "check.sh" not in gpu and shlex.split(gpu)[-3:] == ["-m", "gpu or any_device", "-x"]
    for words in (["-x", "--all"], ["--all", "-x", "--gpu"], ["-x", "--gpu", "--all"]):
        done = subprocess.run([*script, *words], env=environment, capture_output=True, text=True, check=True).stdout
        chosen = ["slow or not slow"] if "--gpu" not in words else ["gpu or any_device"]
        assert shlex.split(done)[-3:] == ["-m", *chosen, "-x"], words
        assert ("check.sh" in done) == ("--gpu" not in words)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("site", ["serv"], "site: serv: must be serve or nothing"),
        ("site", ["serve", "now"], "site: serve now: must be serve or nothing"),
        ("compile_releases", ["--al"], "compile: --al: must be --all or nothing"),
        ("compile_releases", ["--all", "90"], "compile: --all 90: must be --all or nothing"),
        ("release_check", ["--help"], "release: --help: must be one folder or nothing"),
        ("release_check", ["a", "b"], "release: a b: must be one folder or nothing"),
    ],
)
def test_a_command_refuses_other_arguments(script: str, words: list[str], message: str) -> None:
    command, environment = ["bash", str(ROOT / f"scripts/{script}.sh"), *words], {**os.environ, "DRY_RUN": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{message}\n")


def test_test_command_without_a_gpu() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", str(ROOT / "scripts/test.sh"), "--gpu"], env=hidden, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("test: --gpu: nvidia-smi finds no GPU here, or CUDA_VISIBLE_DEVICES hides it; ")
