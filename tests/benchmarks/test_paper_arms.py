"""The table of arms, which the driver accepts, budgets and schedules of a comparison, and the settings it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from paper_arms import ARMS, BASE, MODELS, OWN, ROOT, Schedule, Settings, amount, launch_of, rates_of

from megablocks.config import ConfigError


def _settings(model: str = "xs", **variables: str) -> Settings:
    return Settings.from_environment(model, variables, data="d", commit="c")


def _flags(arm: str, model: str = "xs") -> dict[str, str]:
    """The flags of the launch; of repeated ones the last, as the driver reads them."""
    settings = _settings(model, ARMS="all")
    launch = launch_of(settings, arm, Schedule.of(settings, 1e8, 10**7), Path("run"), micro_batch=8)
    words = launch.variables["FLAGS"].split()
    return {a: b for a, b in zip(words, [*words[1:], "--"], strict=True) if a.startswith("--")}


def test_every_arm_names_a_script_and_differs_from_the_others() -> None:
    launches = set()
    for model in MODELS:
        settings = _settings(model, ARMS="all")
        for arm in ARMS:
            launch = launch_of(settings, arm, Schedule.of(settings, 1e8, 10**7), Path("run"))
            assert Path(launch.command[1]).is_file(), arm
            assert "{" not in str(launch), arm
            launches.add((model, str(launch)))
    assert len(launches) == len(MODELS) * len(ARMS)


def test_arms_are_equal_in_everything_but_the_method() -> None:
    method = {"--moe-capacity-factor", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size",
              "--moe-router-topk-scaling-factor"}  # fmt: skip
    shared = _flags(BASE)
    assert shared.pop("--megablocks-fixed-validation") == "--save="
    groups = {"load": "--moe-router-force-", "short": "--exit-interval"}
    for arm in ARMS:
        its = ("--megablocks-", groups.get(ARMS[arm].group, "--megablocks-"))
        rest = {k: v for k, v in _flags(arm).items() if k not in method and not k.startswith(its)}
        assert rest == shared, arm
    assert shared["--seed"] == "1234" and shared["--lr"] == "0.0006" and shared["--min-lr"] == "6e-05"


def test_flags_that_a_comparison_sets_itself_are_refused_with_their_variable() -> None:
    assert {"--megablocks-fixed-validation", "--", *OWN} >= {flag.split("=")[0] for flag in _flags(BASE)}
    for flag, variable in OWN.items():
        for word in (flag, f"{flag}=3"):
            said = f"FLAGS=--bf16 {word} 3: {flag} is set for each run; leave it out, use {variable}"
            with pytest.raises(ConfigError, match=re.escape(said)):
                _settings(FLAGS=f"--bf16 {word} 3")
    assert _settings(FLAGS="--seed-everything 3").flags == "--seed-everything 3"


@pytest.mark.parametrize("model", list(MODELS))
def test_fine_grained_arms_have_the_active_parameters_of_the_dense_model(model: str) -> None:
    dense = 4 * MODELS[model].hidden
    assert int(_flags("fine", model)["--moe-ffn-hidden-size"]) * ARMS["fine"].top_k == dense
    shared = _flags("fine-shared", model)
    width, extra = (int(shared[f"--moe-{name}"]) for name in ("ffn-hidden-size", "shared-expert-intermediate-size"))
    assert width * ARMS["fine-shared"].top_k + extra == dense


def test_a_capacity_arm_is_the_published_script_in_bf16() -> None:
    """exp/moe is exp/dmoe with a capacity factor, but for fp16 and its learning rate."""
    dmoe, moe = (_body(ROOT / f"exp/{kind}/{kind}_46m_8gpu.sh") for kind in ("dmoe", "moe"))
    differ = {"--moe-capacity-factor", "$CAPACITY_FACTOR", "--lr", "6e-4", "1.5e-4", "6e-5", "1e-5", "--bf16", "--fp16"}
    assert set(dmoe) ^ set(moe) <= differ
    assert ARMS["capacity-1"].published == ("1.5e-4", "1e-5")


def _body(script: Path) -> list[str]:
    return shlex.split(script.read_text().split("launch ")[1].replace("\\\n", " "))[1:]


@pytest.mark.parametrize(
    ("text", "value"),
    [("100M", (1e8, False)), ("10B", (1e10, False)), ("300k", (3e5, False)), ("5000", (5e3, False)),
     ("10min", (600.0, True)), ("1.5min", (90.0, True))],
)  # fmt: skip
def test_budgets(text: str, value: tuple[float, bool]) -> None:
    assert amount("BUDGET", text) == value


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("BUDGET", "10 hours", "tokens or minutes, such as 100M, 10B or 10min"),
        ("BUDGET", "-5M", "tokens or minutes"),
        ("BUDGET", "nanM", "tokens or minutes"),
        ("ARMS", "dense,dmoe,tutle", "'tutle' must be all, paper,"),
        ("ARMS", "dmoe", "must hold dense and another arm"),
        ("SEEDS", "0", "a whole number from 1"),
        ("SEEDS", "three", "a whole number from 1"),
        ("SEEDS", "dmoe:2", "must be for all arms"),
        ("SEEDS", "1,dmoe:2", "dense's the largest"),
        ("RATES", "best", "published, tuned, or one learning rate"),
        ("RATES", "2", "published, tuned, or one learning rate"),
        ("SEEDS", "1,2", "two numbers for all arms"),
        ("SEEDS", "2,dmoe:1,dmoe:2", "two numbers for dmoe"),
        ("SAVE_EVERY", "5min", "tokens, such as 500M, or 0"),
        ("SAVE_EVERY", "-1", "tokens, such as 500M, or 0"),
        ("FLAGS", "--load elsewhere", "--load is set for each run; leave it out, use OUT"),
        ("NGPU", "0", "a whole number from 1"),
        ("BATCH", "x", "a whole number from 0"),
        ("MICRO_BATCH", "x", "a whole number from 0"),
        ("MICRO_BATCH", "128,tutel-9:16", "'tutel-9' must be one of dense,"),
    ],
)
def test_a_bad_setting_is_one_line(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _settings(**{variable: value})
    said = str(refused.value)
    assert said.startswith(f"{variable}={value}: ") and allowed in said and "\n" not in said


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused() -> None:
    settings = _settings(MICRO_BATCH="128,dmoe:48", ARMS="dense,dmoe")
    with pytest.raises(ConfigError, match=r"MICRO_BATCH=128,dmoe:48: 48 of dmoe must divide 128 \(BATCH\)"):
        settings.check_micro_batches(128)
    settings.check_micro_batches(384)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="MODEL=huge: must be one of xs, small, toy"):
        _settings("huge")


@pytest.mark.parametrize(
    ("budget", "batch", "steps"), [("100M", 128, 800), ("10B", 512, 19100), ("300M", 256, 1200), ("5M", 128, 40)]
)
def test_schedules(budget: str, batch: int, steps: int) -> None:
    schedule = Schedule.of(_settings(BUDGET=budget), amount("BUDGET", budget)[0], 10**9)
    assert (schedule.batch, schedule.steps) == (batch, steps)
    assert schedule.steps * batch * 1024 >= amount("BUDGET", budget)[0]
    # The last step is logged and evaluated.
    assert schedule.steps % schedule.eval_interval == schedule.eval_interval % schedule.log_interval == 0


def test_the_batch_is_known_before_minutes_become_tokens_and_in_the_tuning() -> None:
    assert Schedule.of(_settings(BUDGET="90min"), 1e10, 10**9).batch == 128
    assert Schedule.of(_settings(BUDGET="10B"), 1e7, 10**9, batch=512).batch == 512


@pytest.mark.parametrize("out", [Path("/far/out"), ROOT / "runs/out"])
def test_a_launch_is_written_without_the_paths_of_a_machine(out: Path) -> None:
    settings, folder = _settings(), out / "runs/dmoe/1"
    launch = launch_of(settings, "dmoe", Schedule.of(settings, 1e8, 10**7), folder)
    assert launch.portable(folder).endswith(" bash exp/dmoe/dmoe_46m_8gpu.sh EXP_DIR 800 64")


def test_evaluations_read_no_more_than_there_is_and_short_runs_do_not_save() -> None:
    few = Schedule.of(_settings(), 1e8, 3 * 128 * 1024 + 5)
    assert Schedule.of(_settings(), 1e8, 10**9).eval_iters == 8
    assert few.eval_iters == 3 and "--save= " not in few.flags and few.flags.endswith("--save=")
    long = Schedule.of(_settings(BUDGET="10B"), 1e10, 10**9)
    # 500M tokens are 953 steps, and a log interval 191.
    assert long.save_interval == 955 == 5 * long.log_interval and "--save-interval 955" in long.flags
    assert Schedule.of(_settings(SAVE_EVERY="0"), 1e10, 10**9).flags.endswith("--save=")


@pytest.mark.parametrize(
    ("steps", "share"), [(20, "0.1"), (800, "0.1"), (4000, "0.05"), (20000, "0.01"), (10**6, "0.01")]
)
def test_a_run_warms_up_over_200_steps_or_a_tenth(steps: int, share: str) -> None:
    schedule = Schedule.of(_settings(), 1e8, 10**7)._replace(steps=steps)
    assert schedule.flags.startswith(f"--lr-warmup-fraction {share} --")


def test_learning_rates() -> None:
    assert rates_of(_settings(), "capacity-1") == ("0.0006", "6e-05")
    assert rates_of(_settings(RATES="published"), "capacity-1") == ("1.5e-4", "1e-5")
    assert rates_of(_settings(RATES="tuned"), "capacity-1", 3e-4) == ("0.0003", "3e-05")


def test_a_changed_setting_is_refused(tmp_path: Path) -> None:
    before = _settings(BUDGET="100M", SEEDS="3")
    again = Settings.from_dict(before.to_dict())
    assert again == before
    again.refuse_change(before, tmp_path)
    with pytest.raises(ConfigError, match=f"BUDGET=200M: {tmp_path} was started with 100M; use that, or another"):
        _settings(BUDGET="200M", SEEDS="3").refuse_change(before, tmp_path)
    _settings(BUDGET="100M", SEEDS="2", ARMS="dense,dmoe").refuse_change(before, tmp_path)


def test_micro_batches_by_arm(tmp_path: Path) -> None:
    before = _settings(MICRO_BATCH="128,tutel-1:32", ARMS="dense,dmoe")
    assert [before.micro_batch_of(arm) for arm in ("dense", "tutel-1", "tutel-0")] == [128, 32, 128]
    some = _settings(MICRO_BATCH="tutel-1:32")
    assert [some.micro_batch_of(arm) for arm in ("dense", "tutel-1")] == [None, 32]
    assert Settings.from_dict({**before.to_dict(), "micro_batch": 0}) == _settings(MICRO_BATCH="0", ARMS="dense,dmoe")
    assert Settings.from_dict({**before.to_dict(), "seeds": 1}) == before
    assert Settings.from_dict({**before.to_dict(), "micro_batch": 64}).micro_batch_of("dense") == 64
    _settings(MICRO_BATCH="128,tutel-0:16", ARMS="dense,dmoe,tutel-0").refuse_change(before, tmp_path)
    with pytest.raises(ConfigError, match="MICRO_BATCH=128,dmoe:16: .* was started with 128,tutel-1:32"):
        _settings(MICRO_BATCH="128,dmoe:16", ARMS="dense,dmoe").refuse_change(before, tmp_path)


def test_a_short_run_ends_at_an_evaluation() -> None:
    schedule = Schedule.of(_settings(), 1e8, 10**7)
    assert (schedule.last_step("tutel-0-short"), schedule.last_step("tutel-0")) == (240, 800)
    assert _flags("tutel-0-short")["--exit-interval"] == "240" and "--exit-interval" not in _flags("tutel-0")


def test_seeds_by_arm() -> None:
    settings = _settings(SEEDS="3", ARMS="all")
    assert list(settings.seeds_of("dmoe")) == [1234, 1235, 1236]
    assert list(_settings(SEEDS="3,tutel-1:1").seeds_of("tutel-1")) == [1234]
    assert list(settings.seeds_of("dmoe-uniform")) == [1234], "only its step time counts"


PARSE = """
import json, os, sys
from megablocks.megatron.cpu import install
from megablocks.megatron.arguments import add_arguments
install()
from megablocks.megatron.gpt import model_config
from megatron.training.arguments import parse_args, validate_args
import quick_flags
quick_flags.remember_help()
os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
verdicts = []
for argv in json.load(sys.stdin):
    sys.argv = ["pretrain_gpt", *argv]
    try:
        args = validate_args(parse_args(add_arguments), {})
        args.padded_vocab_size = 1024
        model_config(args)
        verdicts.append([args.num_experts, args.lr, args.bf16, args.train_iters])
    except (Exception, SystemExit) as error:
        verdicts.append(f"{type(error).__name__}: {error}")
print("VERDICTS", json.dumps(verdicts))
"""


def test_L1_the_driver_accepts_every_arm(tmp_path: Path) -> None:
    """One process parses them all. Tutel's arms are printed from the table, since the package is not here."""
    cases, names = [], []
    for model in MODELS:
        settings = Settings.from_environment(model, {"ARMS": "all"}, data="", commit="")
        for arm in ARMS:
            launch = launch_of(settings, arm, Schedule.of(settings, 1e8, 10**7), tmp_path / "run", micro_batch=8)
            environment = {**os.environ, **launch.variables, "DRY_RUN": "1", "DATA_PREFIX": str(tmp_path)}
            done = subprocess.run(launch.command, env=environment, capture_output=True, text=True, check=True)
            words = shlex.split(done.stdout)
            words = words[words.index("-m", 3) + 2 :]
            at = words.index("--data-prefix")
            cases.append([*words[:at], "--mock-data", "--vocab-size", "1024", "--tokenizer-type", "NullTokenizer",
                          *words[at + 2 :]])  # fmt: skip
            names.append((model, arm))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/reliability")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    parse = [sys.executable, "-c", PARSE]
    done = subprocess.run(parse, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VERDICTS ")]
    for name, verdict in zip(names, json.loads(line.removeprefix("VERDICTS ")), strict=True):
        assert isinstance(verdict, list), f"{name}: {verdict}"
        assert verdict[1:3] == [6e-4, True], name
