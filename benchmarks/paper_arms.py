"""What a comparison of `exp/paper` trains: its models, its arms, and the settings that all arms share.

An arm is a script of exp/ and what it is started with. Every arm of a comparison gets the same seeds, batch, precision,
number of steps and schedule of the learning rate, so they see the same tokens in the same order.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megablocks.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent
FIRST_SEED = 1234
TRIED_RATES = (3e-4, 6e-4, 1.2e-3)
"""Learning rates that RATES=tuned tries, for every arm alike."""
TUNING_SHARE = 0.1
"""The part of the budget that a run of the tuning gets."""
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "min": 60.0}


class Model(NamedTuple):
    """size: of the published scripts' names. rate: tokens/s of dMoE on one H200, for a first estimate of the time.

    larger: size of the next larger dense model; larger_flags: what makes it larger where the script does not.
    """

    title: str
    size: str
    layers: int
    hidden: int
    rate: float
    larger: str
    larger_flags: str = ""
    experts: int = 64
    sequence: int = 1024
    flags: str = ""


_TOY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
    "--make-vocab-size-divisible-by 8"
)
MODELS = {
    "xs": Model("XS", "46m", 6, 512, 1.18e6, "125m"),
    "small": Model("Small", "125m", 12, 768, 445e3, "356m"),
    "toy": Model("toy", "46m", 2, 64, 1e4, "46m", "--hidden-size 128", experts=8, sequence=64, flags=_TOY),
}


class Arm(NamedTuple):
    """One method.

    label: its name in tables and pictures. group: what ARMS may name. script: below exp/, with {size}.
    positional: after EXP_DIR and STEPS. flags: of the driver. Both may hold {experts} and the fine-grained model's
        {fine_experts} and {fine_width}, which give a token as many active parameters as the dense model has. The script
        and the flags may hold {larger} and {larger_flags}.
    top_k: pairs (token, expert) a token and layer; 0 for a dense model. seeds: at most so many.
    log: a line that the log must hold, so that no other layer stands in for this one.
    published: learning rate and its end in the published script. needs: a package without which the arm is not run.
    has_quality: whether its loss may be compared. part: of the steps, after which its run ends. note: what a reader of
        its figures must know.
    """

    label: str
    group: str
    script: str
    positional: str = ""
    flags: str = ""
    top_k: int = 1
    seeds: int = 99
    published: tuple[str, str] = ("6e-4", "6e-5")
    needs: str = ""
    has_quality: bool = True
    part: float = 1.0
    log: str = ""
    note: str = ""


_DMOE, _TUTEL = "dmoe/dmoe_{size}_8gpu.sh", "tutel/tutel_{size}_8gpu.sh"
_FACTORS = ("1", "1.5", "2", "0")
_FP16 = ("1.5e-4", "1e-5")
_PADS = {"0": "pads every expert to the fullest one"}
_DROPS = "drops tokens and computes the padding"


def _capacity(factor: str, rule: str = "megablocks") -> Arm:
    # exp/dmoe with a capacity factor is exp/moe in bf16; exp/moe has the published fp16, which no flag takes back.
    flags = f"--moe-capacity-factor {factor} --megablocks-pad-to-capacity"
    label, group = f"ours, capacity {factor}", "paper"
    if rule == "tutel":
        flags, label, group = f"{flags} --megablocks-capacity-rule tutel", f"{label}, Tutel's rule", "rules"
    return Arm(label, group, _DMOE, "{experts}", flags, published=_FP16, note=_PADS.get(factor, _DROPS))


def _tutel(factor: str) -> Arm:
    label = f"Tutel, capacity {factor}" if factor != "0" else "Tutel, dynamic capacity (0)"
    return Arm(label, "tutel", _TUTEL, f"{{experts}} {factor}", needs="tutel",
               log="mixture-of-experts layer: Tutel's own", note=_PADS.get(factor, _DROPS))  # fmt: skip


_SHORT = 0.3
"""The part of the steps of a short run. The report compares it with dMoE's step time over the same steps."""
_LOADS = {
    "uniform": ("--moe-router-force-load-balancing", "random logits: experts with equal chances"),
    "skewed": ("--moe-router-force-biased=-0.3",
               "random logits and a fixed bias of std 0.3: of 64 experts the fullest has about 4 times the mean"),
}  # fmt: skip


def _forced(load: str, arm: str) -> Arm:
    flags, note = _LOADS[load]
    one = {"dmoe": Arm("dMoE", "", _DMOE, "{experts}"), "capacity-0": _capacity("0"), "tutel-0": _tutel("0")}[arm]
    note = "; ".join(filter(None, [one.note, note, "only its step time, memory and load count"]))
    return one._replace(label=f"{one.label}, {load} load", group="load", flags=f"{one.flags} {flags}".strip(),
                        seeds=1, has_quality=False, note=note)  # fmt: skip


def _short(one: Arm) -> Arm:
    note = f"{one.note}; its run ends after {_SHORT:.0%} of the steps: only its step time, memory and load count"
    return one._replace(label=f"{one.label}, short run", group="short", seeds=1, has_quality=False, part=_SHORT,
                        note=note)  # fmt: skip


_FINE = "--moe-ffn-hidden-size {fine_width}"
ARMS = {
    "dense": Arm("dense", "paper", "gpt2/gpt2_{size}_8gpu.sh", top_k=0),
    "dense-larger": Arm("larger dense", "sizes", "gpt2/gpt2_{larger}_8gpu.sh", flags="{larger_flags}", top_k=0,
                        note="the next larger dense model, on the same tokens"),
    "dmoe": Arm("dMoE", "paper", _DMOE, "{experts}"),
    **{f"capacity-{factor}": _capacity(factor) for factor in _FACTORS},
    **{f"tutel-{factor}": _tutel(factor) for factor in _FACTORS},
    **{f"capacity-{factor}-tutel-rule": _capacity(factor, "tutel") for factor in _FACTORS},
    "megatron": Arm("Megatron's own layer", "variants", _DMOE, "{experts}", "--megablocks-layer megatron",
                    note="dropless, without Transformer Engine"),
    "dmoe-scaled": Arm("dMoE, weights times 32", "variants", _DMOE, "{experts}", "--moe-router-topk-scaling-factor 32",
                       note="a fresh router of XS passes on 84% of an expert's output, where dMoE's passes on 2.6%"),
    "rounding": Arm("token rounding", "variants", _DMOE, "{experts}", "--megablocks-token-rounding nearest",
                    note="evaluated with plain top-k"),
    "expert-choice": Arm("expert choice", "variants", _DMOE, "{experts} 1 0", "--megablocks-router-type expert_choice",
                         note="its router sees later tokens of the text, so its loss is no causal model's"),
    "fine": Arm("fine-grained, top-8", "variants", _DMOE, "{fine_experts} 8", _FINE, top_k=8),
    "fine-shared": Arm("fine-grained, top-7 and a shared expert", "variants", _DMOE, "{fine_experts} 7",
                       f"{_FINE} --moe-shared-expert-intermediate-size {{fine_width}}", top_k=7),
    **{f"{arm}-{load}": _forced(load, arm) for load in _LOADS for arm in ("dmoe", "capacity-0", "tutel-0")},
    "capacity-0-short": _short(_capacity("0")),
    "tutel-0-short": _short(_tutel("0")),
}  # fmt: skip
BASE, LARGER = "dense", "dense-larger"
"""The arm whose final loss the others' times are measured to, and the one with whose loss the paper compares, too."""
GROUPS = tuple(dict.fromkeys(arm.group for arm in ARMS.values()))
_SCHEDULE = "train-iters exit-interval lr-warmup-fraction log-interval eval-interval eval-iters log-memory-interval"
OWN = {
    "--seed": "SEEDS",
    "--lr": "RATES",
    "--min-lr": "RATES",
    "--global-batch-size": "BATCH",
    "--micro-batch-size": "MICRO_BATCH",
    "--save": "SAVE_EVERY",
    "--save-interval": "SAVE_EVERY",
    "--data-prefix": "DATA_PREFIX",
    "--load": "OUT",
    "--megablocks-run-dir": "OUT",
    **{f"--{name}": "BUDGET" for name in _SCHEDULE.split()},
}
"""The driver's flags that a comparison sets for each run, and the variable that decides them. FLAGS, which come last,
would override them in every run."""


def amount(
    name: str, text: str, allowed: str = "tokens or minutes, such as 100M, 10B or 10min"
) -> tuple[float, bool]:
    """(tokens, False) or (seconds, True) of "100M", "10B", "300k", "5000" or "10min". Raises ConfigError."""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise ConfigError(f"{name}={text}: must be {allowed}")
    return value, unit == "min"


def _chosen(text: str) -> tuple[str, ...]:
    """The arms that ARMS names: arms and groups, separated by commas, in the order of the table."""
    words = set(text.split(","))
    if unknown := sorted(words - {"all", *ARMS, *GROUPS}):
        raise ConfigError(f"ARMS={text}: {unknown[0]!r} must be all, {', '.join(GROUPS)}, or one of {', '.join(ARMS)}")
    names = tuple(name for name, arm in ARMS.items() if words & {"all", name, arm.group})
    if BASE not in names or len(names) < 2:
        raise ConfigError(f"ARMS={text}: must hold {BASE} and another arm, for losses are compared with {BASE}'s")
    return names


def whole(name: str, text: str, low: int = 1) -> int:
    """Raises ConfigError, one line with the variable's name and value."""
    if not text.isdecimal() or not low <= int(text) <= 10**6:
        raise ConfigError(f"{name}={text}: must be a whole number from {low} to {10**6}")
    return int(text)


def _by_arm(name: str, text: str, low: int) -> dict[str, int]:
    """Numbers by arm of "128,tutel-0:16"; "" is the arm of the one for all others."""
    numbers: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        arm, _, number = word.rpartition(":")
        if arm not in ("", *ARMS):
            raise ConfigError(f"{name}={text}: {arm!r} must be one of {', '.join(ARMS)}")
        if arm in numbers:
            raise ConfigError(f"{name}={text}: holds two numbers for {arm or 'all arms'}; give one")
        numbers[arm] = whole(name, number, low)
    return numbers


@dataclass(frozen=True)
class Settings:
    """What decides a comparison's results. A folder holds runs of one such set only, but may get more arms and seeds.

    arms, seeds: those of the report; seeds of all arms, and of single ones (3,tutel-1:1). rates: a learning rate of all
    arms, "published" or "tuned". batch: sequences a step, 0 for the default by budget. micro_batch: of all arms, and of
    single ones (128,tutel-0:16); an arm without a number gets the largest that fits. data: the set's fingerprint.
    """

    model: str
    budget: str
    arms: tuple[str, ...]
    seeds: str
    rates: str
    batch: int
    micro_batch: str
    save_every: str
    ngpu: int
    flags: str
    data: str
    commit: str

    @classmethod
    def from_environment(cls, model: str, environ: Mapping[str, str], *, data: str, commit: str) -> Settings:
        """Raises ConfigError, one line with the variable, its value and what is allowed."""
        if model not in MODELS:
            raise ConfigError(f"MODEL={model}: must be one of {', '.join(MODELS)}")
        get = environ.get
        rates, save_every, budget = get("RATES") or "6e-4", get("SAVE_EVERY") or "500M", get("BUDGET") or "10min"
        amount("BUDGET", budget)
        micro_batch = "" if get("MICRO_BATCH") == "0" else get("MICRO_BATCH") or ""
        seeds = get("SEEDS") or "1"
        _by_arm("MICRO_BATCH", micro_batch, 0)
        numbers = _by_arm("SEEDS", seeds, 1)
        if "" not in numbers or numbers.get(BASE, numbers[""]) < max(numbers.values()):
            raise ConfigError(f"SEEDS={seeds}: must be for all arms, such as 3,tutel-1:1, {BASE}'s the largest")
        allowed = "tokens, such as 500M, or 0 for never"
        if save_every != "0" and amount("SAVE_EVERY", save_every, allowed)[1]:
            raise ConfigError(f"SAVE_EVERY={save_every}: must be {allowed}")
        if rates not in ("published", "tuned"):
            try:
                good = 0 < float(rates) < 1
            except ValueError:
                good = False
            if not good:
                raise ConfigError(f"RATES={rates}: must be published, tuned, or one learning rate below 1 for all arms")
        for word in (flags := get("FLAGS") or "").split():
            if own := OWN.get(flag := word.split("=")[0]):
                raise ConfigError(f"FLAGS={flags}: {flag} is set for each run; leave it out, use {own}")
        return cls(
            model=model,
            budget=budget,
            arms=_chosen(get("ARMS") or "paper,tutel"),
            seeds=seeds,
            rates=rates,
            batch=whole("BATCH", get("BATCH") or "0", 0),
            micro_batch=micro_batch,
            save_every=save_every,
            ngpu=whole("NGPU", get("NGPU") or "1"),
            flags=flags,
            data=data,
            commit=commit,
        )

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Those in `path`, a settings.json. Raises ConfigError if there are none."""
        return cls.from_dict(read_written(path, *(field.name for field in fields(cls))))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Settings:
        known = {name: values[name] for name in (field.name for field in fields(cls))}
        for name in ("micro_batch", "seeds"):  # numbers in older folders and records
            known[name] = str(known[name] or "")
        return cls(**{**known, "arms": tuple(known["arms"])})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "arms": list(self.arms)}

    def refuse_change(self, before: Settings, folder: Path) -> None:
        """Raises ConfigError with the first setting in which `folder`, started with `before`, differs.

        ARMS and SEEDS may change: they say which runs there are, and no run depends on another one. So may MICRO_BATCH
        for arms that are new.
        """
        same = ["arms", "seeds"]
        if all(self.micro_batch_of(arm) == before.micro_batch_of(arm) for arm in before.arms):
            same.append("micro_batch")
        for name, was in before.to_dict().items():
            if name not in same and (now := self.to_dict()[name]) != was:
                name = {"data": "DATA_PREFIX's data", "commit": "the code's commit"}.get(name, name.upper())
                raise ConfigError(f"{name}={now}: {folder} was started with {was}; use that, or another folder")

    def check_micro_batches(self, batch: int) -> None:
        """Raises ConfigError if a size that was given does not divide `batch`, the sequences of a step."""
        for arm in self.arms:
            if (size := self.micro_batch_of(arm)) and batch % size:
                raise ConfigError(f"MICRO_BATCH={self.micro_batch}: {size} of {arm} must divide {batch} (BATCH)")

    def micro_batch_of(self, arm: str) -> int | None:
        """The size that was given for an arm, None if it is to be searched."""
        sizes = _by_arm("MICRO_BATCH", self.micro_batch, 0)
        return sizes.get(arm, sizes.get("", 0)) or None

    def seeds_of(self, arm: str) -> range:
        numbers = _by_arm("SEEDS", self.seeds, 1)
        return range(FIRST_SEED, FIRST_SEED + min(numbers.get(arm, numbers[""]), ARMS[arm].seeds))


def read_written(path: Path, *names: str) -> dict[str, Any]:
    """The JSON object with `names` that a comparison wrote to `path`. Raises ConfigError if it is not there."""
    try:
        values = json.loads(path.read_text())
        return {**values, **{name: values[name] for name in names}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"({type(error).__name__}: {error}); restore the file, or choose another folder"
        raise ConfigError(f"{path}: is not as a comparison wrote it {why}") from None


class Schedule(NamedTuple):
    """Steps of a run and what it does how often; the last step is logged and evaluated."""

    steps: int
    batch: int
    log_interval: int
    eval_interval: int
    eval_iters: int
    save_interval: int

    @classmethod
    def of(cls, settings: Settings, tokens: float, valid_tokens: int, batch: int = 0) -> Schedule:
        """At least `tokens` tokens a run, and 20 evaluations (4 of a run below 100 steps).

        batch: that of the comparison, for the shorter runs of the tuning.
        """
        sequence, is_time = MODELS[settings.model].sequence, amount("BUDGET", settings.budget)[1]
        # Micro-batches are searched before a budget in minutes becomes tokens, so its batch must not depend on them.
        sizes = () if is_time else (512, 256)
        by_budget = next((size for size in sizes if tokens >= 600 * size * sequence), 128)
        batch = batch or settings.batch or by_budget
        points, unit = (20, 5) if tokens >= 100 * batch * sequence else (4, 1)
        every = unit * max(1, -(-int(tokens) // (batch * sequence * points * unit)))
        steps = every * points
        # All evaluations together read at most a fifth of the training's tokens. That is a fifteenth of its work, for
        # they have no backward. They read the same samples, so few of them do not make the loss jump.
        iters = max(1, min(steps // (5 * points), valid_tokens // (batch * sequence), 100))
        save, log = 0 if settings.save_every == "0" else amount("SAVE_EVERY", settings.save_every)[0], every // unit
        # Whole log intervals, so that a run that resumes logs the losses and loads of one that was not stopped.
        return cls(steps, batch, log, every, iters, log * math.ceil(save / (log * batch * sequence)))

    def last_step(self, arm: str) -> int:
        """The step that ends a run of the arm; it is evaluated."""
        return -(-int(self.steps * ARMS[arm].part) // self.eval_interval) * self.eval_interval

    @property
    def flags(self) -> str:
        # A run that would not save before its end does not save at all: started again it is the same run.
        saves = 0 < self.save_interval < self.steps
        save = f"--save-interval {self.save_interval}" if saves else "--save="
        # 200 steps, as in the published scripts, where they are 1 % of a run. Here at most a tenth.
        warmup = min(max(200 / self.steps, 0.01), 0.1)
        return (
            f"--lr-warmup-fraction {warmup:g} --global-batch-size {self.batch} --log-interval {self.log_interval} "
            f"--eval-interval {self.eval_interval} --eval-iters {self.eval_iters} "
            f"--log-memory-interval {self.eval_interval} --megablocks-fixed-validation {save}"
        )


def rates_of(settings: Settings, arm: str, tuned: float | None = None) -> tuple[str, str]:
    """The learning rate of an arm and its end. tuned: what RATES=tuned found."""
    if tuned is None and settings.rates == "published":
        return ARMS[arm].published
    rate = float(settings.rates) if tuned is None else tuned
    return f"{rate:g}", f"{rate / 10:g}"


class Launch(NamedTuple):
    """A start of a script of exp/: its command, and the variables that it adds to the environment."""

    command: list[str]
    variables: dict[str, str]

    def portable(self, folder: Path) -> str:
        """The launch without the paths of a machine: a folder may be carried to another one and go on there."""
        return str(self).replace(str(folder), "EXP_DIR").replace(f"{ROOT}/", "")  # the folder may be in ROOT

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, shlex.join(self.command)])


def launch_of(
    settings: Settings,
    arm: str,
    schedule: Schedule,
    folder: Path,
    *,
    seed: int = FIRST_SEED,
    rate: tuple[str, str] | None = None,
    micro_batch: int | None = None,
) -> Launch:
    """The run of an arm in `folder`. Without a micro-batch the script's own stands, as the search for it needs."""
    model, one = MODELS[settings.model], ARMS[arm]
    words = {
        "size": model.size,
        "experts": model.experts,
        "fine_experts": 2 * model.experts,
        "fine_width": 4 * model.hidden // 8,
        "larger": model.larger,
        "larger_flags": model.larger_flags,
    }
    lr, least = rate or rates_of(settings, arm, TRIED_RATES[1] if settings.rates == "tuned" else None)
    flags = [model.flags, one.flags.format(**words), schedule.flags, f"--seed {seed} --lr {lr} --min-lr {least}"]
    if (last := schedule.last_step(arm)) < schedule.steps:
        flags.append(f"--exit-interval {last}")
    if micro_batch is not None:
        flags.append(f"--micro-batch-size {micro_batch}")
    script = ROOT / "exp" / one.script.format(**words)
    command = ["bash", str(script), str(folder), str(schedule.steps), *one.positional.format(**words).split()]
    return Launch(command, {"NGPU": str(settings.ngpu), "FLAGS": " ".join(filter(None, [*flags, settings.flags]))})


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this size reads well: its seconds and its name."""
    return (1.0, "s") if seconds < 120 else (60.0, "min") if seconds < 7200 else (3600.0, "h")


def count(tokens: float) -> str:
    """A number of tokens, such as 104.9M."""
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M")) if tokens >= s), (1e3, "k"))
    return f"{tokens / scale:.4g}{unit}"
