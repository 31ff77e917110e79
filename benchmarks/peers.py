"""Whole layers beside the field's: forward, backward and total TFLOP/s, and the bytes a forward leaves allocated.

    python benchmarks/peers.py [--shapes 0,1,…] [--candidates …] [--out FILE.json]
    python benchmarks/peers.py --merge FILE.json… --out FILE.json

The shapes are the twelve of SonicMoE's paper and the others of peers_h200.json (T,H; I/E/K; SwiGLU, bf16, random
routing). The latter's figures, measured earlier on an H200, are what a peer has to come near: one that reads more than
15 % below voids the run. In turn, in one process a shape: `auto`, `grouped`, `sparse`, `scatter`, `fused` are dMoE with
that mlp_impl, `fused recompute` and `fused 8 bits` keep less for backward; `torch`, `scattermoe`, `sonicmoe` and
`sonicmoe compiled`, as its own benchmark calls it, run if they import; `bmm` is cuBLAS's batched products of the same
FLOPs on even experts, nothing else of a layer. Router included, ours where a peer has none, auxiliary losses off.
TFLOP/s count 6·T·H·I·K forward and 12·T·H·I·K backward; backward is total less forward. They are timed with their
launches already in the GPU's queue, so that a slow host does not count; `eager` is the total without. Every result but
bmm's is compared with float32 first.

SonicMoE counts as the faster of its two, on the total. The shapes' kernels are compiled beside each other before the
first shape is timed. Shapes may be split over runs: --merge puts the files' shapes into one table, whose gate is green
if theirs are and which is void if one of them is. It refuses runs of different commits, GPUs or versions; of a shape
that several files have, the latest run counts. Writes results/<gpu>/peers.json. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from children import Runner, candidate, chosen, parser_of, run_benchmark, run_child
from layer_candidates import FUSED_MODES, OURS, PEER_LAYERS, PEERS, Problem, Step, kind, labelled, random_ids, select
from layer_timing import check_and_time
from measure import (
    Gate,
    dry_run,
    emit,
    gpu_name,
    need_gpu,
    on_gpu,
    peer_figures,
    read_result,
    result_path,
    speed,
    void_reasons,
    write_result,
)

PAPER = tuple(
    f"{size}; {widths}"
    for size, columns in (
        ("40960,768", ("256/128/8", "512/64/4", "1024/32/2")),
        ("24576,1536", ("256/128/8", "512/64/4", "1024/32/2")),
        ("32768,4096", ("256/256/16", "512/128/8", "1024/64/4")),
        ("32768,4096", ("512/256/16", "1024/128/8", "2048/64/4")),
    )
    for widths in columns
)
"""The 1.4B, 7B, 30B and 120B configurations of SonicMoE's benchmark (arXiv 2512.14080)."""
TOY = "64,32; 64/8/2"
SONICMOE = ("sonicmoe", "sonicmoe compiled")
LEAST_GOAL, MEAN_GOAL = 0.98, 1.10
"""fused over SonicMoE: at every shape of the paper, and the geometric mean over them."""
DIFFERS = ("command", "date", "processor")
"""What the runs of one table may have of their own."""
PREPARE_S, AT_ONCE = 200.0, 6
"""Compiling takes a shape's child a minute or two of one core and up to 20 GB of the GPU."""


def labels(toy: bool) -> list[str]:
    return [TOY] if toy else list(dict.fromkeys([*PAPER, *peer_figures()["shapes"]]))


@functools.cache
def load(label: str, wanted: str) -> tuple[Problem, dict[str, Callable[[], Step]]]:
    """A shape and its candidates; each is made once, so that what `prepare` compiled is what is timed."""
    shape, device = labelled(label), "cuda" if on_gpu() else "cpu"
    problem = Problem(shape, random_ids(shape, device), device=device)
    made = select(problem.ours() | problem.fused_modes() | problem.peers() | {"bmm": problem.bmm}, wanted)
    return problem, {name: functools.cache(make) for name, make in made.items()}


def prepare(job: str, args: argparse.Namespace) -> None:
    """Run every candidate once, for what it compiles. What fails here is run again, and counted, when it is timed."""
    import torch

    for name, make in load(labels(args.toy)[int(job)], args.candidates)[1].items():
        with candidate(f"{job}/{name}"):
            make().total()
    if on_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    problem, made = load(labels(args.toy)[int(job)], args.candidates)
    times, memory = check_and_time(job, problem, made, struck, args.rounds, queued=True)
    if times:
        emit(shape=problem.shape.label, flops=problem.shape.forward_flops, memory=memory, times=times)
    load.cache_clear()


def rates(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """TFLOP/s of forward, backward, total and the eager total by candidate."""
    out = {}
    for name in [n.removeprefix("queued/") for n in record["times"] if n.startswith("queued/")]:
        total, forward = record["times"][f"queued/{name}"], record["times"][f"forward/{name}"]
        backward = [t - f for t, f in zip(total, forward, strict=True)]
        flops = record["flops"] / 1e6
        out[name] = {
            "forward": flops / median(forward),
            "backward": 2 * flops / max(median(backward), 1e-9),
            "total": 3 * flops / median(total),
            "eager": 3 * flops / median(record["times"][f"eager/{name}"]),
        }
    return out


def fastest_sonicmoe(times: Mapping[str, Sequence[float]], how: str = "queued") -> str | None:
    """Which of SonicMoE's candidates is the faster, by `how` it is called; None if none ran."""
    ran = [name for name in SONICMOE if times.get(f"{how}/{name}")]
    return min(ran, key=lambda name: median(times[f"{how}/{name}"]), default=None)


def against_sonicmoe(record: Mapping[str, Any]) -> dict[str, float]:
    """Speed of fused over SonicMoE's faster candidate, queued and eager, and its bytes held over SonicMoE's fewest."""
    times, memory, out = record["times"], record["memory"], {}
    for how in ("queued", "eager"):
        ratio = speed(times, f"{how}/fused", f"{how}/{fastest_sonicmoe(times, how)}")
        if ratio is not None:
            out[how] = ratio
    fewest = min((memory[name]["held"] for name in SONICMOE if "held" in memory.get(name, {})), default=None)
    if fewest:
        for name in ("fused", *FUSED_MODES):
            if "held" in memory.get(name, {}):
                out[f"held, {name}"] = memory[name]["held"] / fewest
    return out


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def compare(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """fused over SonicMoE at the paper's shapes that were measured: by shape, least and geometric mean."""
    by_shape = {r["shape"]: found for r in records if "queued" in (found := against_sonicmoe(r))}
    shown = {shape: by_shape[shape] for shape in PAPER if shape in by_shape}
    if not shown:
        return {}
    means = {how: geometric_mean([row[how] for row in shown.values()]) for how in ("queued", "eager")}
    least = min(row["queued"] for row in shown.values())
    print(
        f"\nfused over SonicMoE at {len(shown)} of {len(PAPER)} shapes: queued, eager; its bytes held over SonicMoE's"
    )
    for shape, row in shown.items():
        held = ", ".join(f"{name.removeprefix('held, ')} {v:.2f}" for name, v in row.items() if name.startswith("held"))
        print(f"  {shape:24} {row['queued']:.3f}× {row['eager']:.3f}×   {held}")
    met = len(shown) == len(PAPER) and least >= LEAST_GOAL and means["queued"] >= MEAN_GOAL
    print(f"geometric mean {means['queued']:.3f}× queued, {means['eager']:.3f}× eager, least {least:.3f}×; goal, "
          f"queued, all shapes: {MEAN_GOAL} and {LEAST_GOAL}: {'met' if met else 'not met'}")  # fmt: skip
    return {"shapes": shown, "mean": means["queued"], "eager mean": means["eager"], "least": least, "met": met}


def summarise(records: Sequence[Mapping[str, Any]], gate: Gate) -> tuple[dict[str, Any], list[str]]:
    """Print the table; return it and why the run is void. A red gate or a void run prints no speed-up."""
    gate.report()
    by_shape = {r["shape"]: rates(r) for r in records}
    measured = []
    for r in records:
        table, sonic = by_shape[r["shape"]], fastest_sonicmoe(r["times"])
        counted = {name: name for name in (*PEERS, "bmm") if name in table} | ({"sonicmoe": sonic} if sonic else {})
        measured += [
            (r["shape"], peer, phase, value) for peer, name in counted.items() for phase, value in table[name].items()
        ]
    void = void_reasons(measured, peer_figures(), gpu_name())
    for reason in void:
        print(f"VOID, no speed-up: {reason}")
    if not gate.green or void:
        return {}, void
    shapes = {}
    print("\nTFLOP/s forward / backward / total, MiB held; then auto's and fused's speed over each")
    for r in records:
        table = by_shape[r["shape"]]
        print(f"{r['shape']}")
        rows = {}
        for name, row in table.items():
            held = r["memory"].get(name, {}).get("held")
            ratios = [speed(r["times"], f"queued/{mine}", f"queued/{name}") for mine in ("auto", "fused")]
            rows[name] = {**row, "held": held, "auto_speed": ratios[0], "fused_speed": ratios[1]}
            space = "     –" if held is None else f"{held / 2**20:6.0f}"
            print(f"  {name:17s} {row['forward']:5.0f} / {row['backward']:5.0f} / {row['total']:5.0f} "
                  f"(eager {row['eager']:5.0f}) {space} MiB"
                  + "".join("       –" if ratio is None else f"   {ratio:.2f}×" for ratio in ratios))  # fmt: skip
        shapes[r["shape"]] = rows
    return {"shapes": shapes, "sonicmoe": compare(records)}, void


def taken_on(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all of the runs, by file, were taken on; a package that only some had installed counts as theirs.

    Raises:
        ValueError: different commits, GPUs or versions; names the files.
    """
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for result in results.values() for key in result["environment"]):
        files: dict[Any, list[str]] = {}
        for file, result in results.items():
            files.setdefault(result["environment"].get(key), []).append(file)
        if key not in ("commit", "gpu"):
            files.pop(None, None)  # not installed
        if len(files) > 1 and key not in DIFFERS:
            told = (f"{value} in {', '.join(names)}" for value, names in sorted(files.items(), key=lambda f: len(f[1])))
            raise ValueError(
                f"{key} is {' but '.join(told)}: only runs of one commit, GPU and set of versions are merged"
            )
        common[key] = max(files, default=None)  # of the dates the last one
    return common


def merged(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs, by file, as one: records, Gate, void, environment; a shape comes from the latest run that has it.

    Raises:
        ValueError: as `taken_on`.
    """
    common = taken_on(results)
    red: set[str] = set()
    gate, records, void = Gate(red.__contains__), {}, []
    for file, result in sorted(results.items(), key=lambda item: item[1]["environment"].get("date", "")):
        judged = result["gate"]
        if judged["green"]:
            gate.take({"good": file, "error": judged["largest_error"]})
        else:
            red |= {f"{file}: {key}" for key in judged["red"] or ("nothing checked",)}
        gate.failures |= dict.fromkeys(red - set(gate.failures), "red")
        gate.failures |= {f"{file}: {key}": why for key, why in judged.get("failures", {}).items()}
        records |= {record["shape"]: record for record in result["records"]}
        void += result["void"]
    return {"records": list(records.values()), "gate": gate, "void": void, "environment": common}


def main() -> int:
    parser = parser_of(__doc__, seconds=590.0)
    parser.add_argument("--shapes", default="", help="numbers of the shapes, from 0; default all")
    parser.add_argument("--candidates", default="", help="these alone, by name")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE.json", help="measure nothing")
    parser.add_argument("--toy", action="store_true", help="one small shape, for a CPU")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jobs = chosen(parser, "--shapes", args.shapes, [str(i) for i in range(len(labels(args.toy)))])
    chosen(parser, "--candidates", args.candidates, (*OURS, *FUSED_MODES, *PEER_LAYERS, "bmm"))
    if dry_run():
        for job in jobs:
            print(f"{job}: T,H; I/E/K = {labels(args.toy)[int(job)]}")
        return 0
    if args.child:
        return run_child(args, run_job, prepare if args.wait else None)
    if args.merge:
        try:
            one = merged({str(path): read_result(path) for path in args.merge})
        except (FileNotFoundError, ValueError) as e:
            raise SystemExit(f"peers.py: {e}") from e
        summary, _ = summarise(one["records"], one["gate"]) if not one["void"] else ({}, [])
        out = args.out or result_path("peers", one["environment"]["gpu"])
        write_result(out, "peers", gate=one["gate"], summary=summary, records=one["records"], void=one["void"],
                     taken_on=one["environment"])  # fmt: skip
        print(f"wrote {out}")
        return 0 if one["gate"].green and not one["void"] else 1
    need_gpu(args.toy)
    flags = ["--rounds", str(args.rounds), "--candidates", args.candidates, *["--toy"] * args.toy]
    runner = Runner(__file__, flags, time.monotonic() + args.seconds)

    def run() -> None:
        runner.prepare(jobs, seconds=PREPARE_S, at_once=AT_ONCE)
        runner.run(jobs, quiet=150.0, budget=300.0)  # quiet: a peer may build a CUDA extension on first use

    # A lost job is ours as well: something of it was not measured.
    return run_benchmark(
        runner, "peers", jobs, run, ours=lambda key: "/" not in key or kind(key.rsplit("/", 1)[1]) in OURS,
        summarise=summarise, out=args.out or result_path("peers", gpu_name()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
