"""`plan`: memory and step time of a model at a layout, before you rent the GPUs.

    python -m megablocks plan --gpus 8 -- DRIVER FLAGS
    python -m megablocks plan --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 …

After -- come flags of the driver, megablocks.megatron.pretrain_gpt; the driver's own parser reads them. Put --gpus,
--gpu and --json before --. Without --, use the flags below, which need no Megatron. They equal the driver's
flags; ours have no --megablocks- prefix.
Exit code 0: it fits. 1: it does not; the last line says what to change. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megablocks.config import ConfigError
from megablocks.megatron.settings import PREFIX, add_flags, check_options, flag_of
from megablocks.monitor.flops import memory_gib
from megablocks.tool.commands import Parser, need_megatron
from megablocks.tool.memory import ERROR_BAR_LAYOUT as MEMORY_GUESS
from megablocks.tool.memory import GIB, Memory, memory, parameters
from megablocks.tool.model import Model, from_driver, from_flags
from megablocks.tool.step_time import ERROR_BAR_LAYOUT as TIME_GUESS
from megablocks.tool.step_time import step_time

_OF_THE_MACHINE = ("gpus", "gpu")
_EACH_LAYER = " --recompute-method uniform --recompute-num-layers 1"
"""What Megatron requires in addition to --recompute-granularity full."""
_MOST_PARTS = 4096
"""The most parts into which `changes` splits a micro-batch, or ranks over which it spreads the experts."""


def model_of(argv: Sequence[str]) -> tuple[Model, argparse.Namespace]:
    """Return the model and the options of a command line. Raises ConfigError."""
    words = list(argv)
    cut = words.index("--") if "--" in words else None
    parser = Parser("plan", description=__doc__)
    add_flags(parser, Model, unset=True)
    parser.add_argument("--json", action="store_true")
    options, others = parser.parse_known_args(words[:cut])
    if others:
        raise ConfigError(f"{others[0]}: no flag of plan; give the driver's flags after --")
    if cut is None:
        return from_flags(options), options
    given = [f.name for f in dataclasses.fields(Model) if getattr(options, f.name) is not None]
    for name in given:
        if name not in _OF_THE_MACHINE:
            raise ConfigError(f"{flag_of(name)}: give it after --, with the driver's flags")
    check_options(Model, vars(options))
    flags = words[cut + 1 :]
    if flags and not flags[0].startswith("-"):
        raise ConfigError(f"{flags[0]}: leave it out; only the driver's flags come after --, and --gpus N before --")
    need_megatron()
    from megablocks.megatron.planned import parse

    args = parse(flags, options.gpus or 1)
    return from_driver(args, Model.gpu if options.gpu is None else options.gpu), options


def changes(m: Model) -> Iterator[tuple[str, Model]]:
    """Yield possible changes that save memory, the cheapest first, each with the changed model."""
    parts = range(2, min(m.micro_batch_size, _MOST_PARTS) + 1)
    smaller = [m.micro_batch_size // n for n in parts if m.micro_batch_size % n == 0]
    found: list[tuple[str, dict[str, Any]]] = []
    if not m.fused_loss:
        found.append(("--megablocks-fused-loss", {"fused_loss": True}))
    if m.data_parallel_size > 1 and not m.use_distributed_optimizer:
        found.append(("--use-distributed-optimizer", {"use_distributed_optimizer": True}))
    if m.num_experts and m.impl != "fused":
        found.append(("--megablocks-mlp-impl fused", {"mlp_impl": "fused"}))
    found += [(f"--micro-batch-size {size}", {"micro_batch_size": size}) for size in smaller]
    if m.num_experts:
        flags = "--megablocks-mlp-impl fused --megablocks-recompute-activation"
        found.append((flags, {"mlp_impl": "fused", "recompute_activation": True}))
        most = min(m.gpus, m.num_experts, _MOST_PARTS)
        ranks = [ep for ep in range(m.expert_model_parallel_size + 1, most + 1) if m.gpus % ep == 0]
        found += [(f"--expert-model-parallel-size {ep}", {"expert_model_parallel_size": ep}) for ep in ranks]
    found.append((f"--recompute-granularity full{_EACH_LAYER}", {"recompute_granularity": "full"}))
    for gpus in (2 * m.gpus, 4 * m.gpus, 8 * m.gpus):
        values: dict[str, Any] = {"gpus": gpus, "global_batch_size": None, "use_distributed_optimizer": True}
        flags = f"{gpus} GPUs with --use-distributed-optimizer"
        if m.num_experts:
            values["expert_model_parallel_size"] = m.expert_model_parallel_size * gpus // m.gpus
            flags += f" --expert-model-parallel-size {values['expert_model_parallel_size']}"
        found.append((flags, values))
    for flags, values in found:
        with contextlib.suppress(ConfigError):
            yield flags, dataclasses.replace(m, **values)


def verdict(m: Model, found: Memory, capacity: float | None) -> tuple[str, str]:
    """Return "yes", "maybe" (within the error bar), "no" or "unknown" for a fit into `capacity` GiB, and a line."""
    need, bar = found.needed / GIB, found.error_bar * found.peak / GIB
    if capacity is None:
        kept = ", if it keeps all logits" if m.fused_loss and m.fused_loss_kept_gib is None else ""
        return "unknown", f"needs {need:.1f} ± {bar:.1f} GiB a GPU{kept}; the memory of {m.gpu} is unknown here"
    size = f"{need:.1f} ± {bar:.1f} of {capacity:.1f} GiB"
    if need + bar <= capacity:
        return "yes", f"fits: {size}"
    fits, said = ("maybe", "may not fit") if need <= capacity else ("no", "does not fit")
    for text, other in changes(m):
        after = memory(other)
        bar = after.error_bar * after.peak
        if after.needed + bar <= capacity * GIB:
            return fits, f"{said}: {size}; {text} needs {after.needed / GIB:.1f} ± {bar / GIB:.1f}"
    return fits, f"{said}: {size}; spread it over more GPUs, by --tensor-model-parallel-size"


def advice(m: Model) -> str:
    """Return a line with the flags of a CUDA graph if the host limits the step and they make it 5 % shorter, or ""."""
    flags = {"cuda_graph_impl": "full_iteration"}
    if m.expert_model_parallel_size > 1:
        flags["dispatcher"] = "symmetric"
    before, after = step_time(m), None
    with contextlib.suppress(ConfigError):  # no graph can hold this layout, or the batch that was filled in is absurd
        after = step_time(dataclasses.replace(m, **flags))  # type: ignore[arg-type]
    if before is None or after is None or after.milliseconds > 0.95 * before.milliseconds:
        return ""
    said = " ".join(f"{flag_of((PREFIX if name == 'dispatcher' else '') + name)} {flags[name]}" for name in flags)
    return f"the host limits the speed; with {said} a step takes {after.milliseconds:.1f} ms"


def report(m: Model) -> dict[str, Any]:
    """Return everything that `plan` prints, in GiB and ms."""
    p, found, time = parameters(m), memory(m), step_time(m)
    capacity = memory_gib(m.gpu)
    fits, line = verdict(m, found, capacity)
    return {
        "model": dataclasses.asdict(m),
        "mlp_impl": m.impl if m.num_experts else None,
        "parameters": {"total": p.total, "active": p.active, "per_gpu": p.per_gpu},
        "memory": {
            "parts": {name: size / GIB for name, size in found.parts.items()},
            "peak": found.peak / GIB,
            "outside_of_tensors": {name: size / GIB for name, size in found.outside.items()},
            "needed": found.needed / GIB,
            "available": capacity,
            "error_bar": found.error_bar,
        },
        "step": None if time is None else {**time._asdict(), "ms": time.milliseconds},
        "fits": fits,
        "verdict": line,
        "advice": advice(m),
    }


def _rows(values: dict[str, float], digits: int) -> list[str]:
    return [f"  {name:<50}{value:>10.{digits}f}" for name, value in values.items()]


def _bar(share: float | None, guess: float) -> str:
    return "" if share is None else f"  ± {share:.0%}{', a guess' if share == guess else ''}"


def text_of(found: dict[str, Any]) -> str:
    m, p, mem, step = found["model"], found["parameters"], found["memory"], found["step"]
    impl = f", mlp_impl {found['mlp_impl']}" if found["mlp_impl"] else ""
    lines = [
        f"{m['gpus']} x {m['gpu']}: TP {m['tensor_model_parallel_size']}, PP {m['pipeline_model_parallel_size']}, "
        f"EP {m['expert_model_parallel_size']}; micro-batch {m['micro_batch_size']}, global batch "
        f"{m['global_batch_size']}, vocabulary {m['vocab_size']:,}{impl}",
        f"parameters: {p['total']:,}; active for a token: {p['active']:,}; on a GPU: {p['per_gpu']:,}",
        "",
        f"{'memory of a GPU':<52}{'GiB':>10}",
        *_rows(mem["parts"], 2),
        f"{'peak of tensors':<52}{mem['peak']:>10.2f}{_bar(mem['error_bar'], MEMORY_GUESS)}",
        *_rows(mem["outside_of_tensors"], 2),
        f"{'needed':<52}{mem['needed']:>10.2f}",
        "",
    ]
    if step is None:
        lines.append("step time: unknown for this GPU or for float32")
    else:
        share = "unknown" if step["mfu"] is None else f"{step['mfu']:.1%}"
        lines += [f"{'a step':<52}{'ms':>10}", *_rows(step["parts"], 1)]
        lines += [f"{'together':<52}{step['ms']:>10.1f}{_bar(step['error_bar'], TIME_GUESS)}"]
        if step["error_bar"] is None:
            lines.append("no error bar: the host limits the speed, and was measured for layers with experts only")
        lines += [f"tokens/s: {step['tokens_per_second']:,.0f}; MFU: {share}"]
    if m["gpus"] > 1:
        lines.append("several GPUs: only two were measured; no communication is hidden behind other work")
    if found["advice"]:
        lines.append(found["advice"])
    return "\n".join([*lines, "", found["verdict"]])


def main(argv: Sequence[str]) -> int:
    m, options = model_of(argv)
    found = report(m)
    if "--" not in argv:  # plan's own flags have no prefix, and do not include _EACH_LAYER
        for line in ("verdict", "advice"):
            found[line] = found[line].replace(flag_of(PREFIX), "--").replace(_EACH_LAYER, "")
    print(json.dumps(found, indent=1) if options.json else text_of(found))
    return 1 if found["fits"] == "no" else 0
