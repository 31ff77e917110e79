"""Whole layers compared with those of other packages: TFLOP/s of forward and backward, and memory held for backward.

    python benchmarks/peers.py [--shapes 0,1,…] [--candidates …] [--skew 16] [--out FILE.json]
    python benchmarks/peers.py --merge FILE.json… --out FILE.json

The shapes are the twelve of SonicMoE's paper and the others of peers_h200.json (T,H; I/E/K; SwiGLU, bf16, random
routing). peers_h200.json holds earlier figures of the peers on an H200. A peer more than 15 % below them voids the run.
With --skew S the fullest expert gets S times the mean, and the others follow Zipf's law; S <= E/K.

Candidates, in turn in one process per shape:

    auto, grouped, sparse, scatter, fused   dMoE with that mlp_impl
    fused recompute, fused 8 bits           fused with less saved for backward
    torch, scattermoe, sonicmoe             peers, if they are installed
    sonicmoe compiled                       the same as in SonicMoE's own benchmark
    bmm                                     only cuBLAS's batched products, with the same FLOPs on even experts

The router is part of a layer: a peer without a router gets ours. Auxiliary losses are off. TFLOP/s count 6·T·H·I·K
forward and 12·T·H·I·K backward; the time of backward is total minus forward. The launches are already in the GPU's
queue when they are timed, so a slow host does not count. `eager` is the total without that. All results except those
of bmm are first compared with float32.

SonicMoE counts with the faster of its two candidates, by total. All shapes compile at the same time before the first is
timed. The shapes may be split over several runs: --merge writes the shapes of several files into one result. It refuses
runs with different commits, GPUs or versions. If several files have a shape, the latest run counts. The merged gate is
red, or the merged run void, if that of any file is. Writes results/<gpu>/peers.json. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from children import add_names, candidate, chosen, parser_of, run_benchmark
from layer_candidates import (
    FUSED_MODES,
    OURS,
    PEER_LAYERS,
    PEERS,
    Problem,
    Step,
    kind,
    labelled,
    random_ids,
    select,
    skewed,
)
from layer_timing import check_and_time
from measure import (
    Gate,
    cells,
    dry_run,
    emit,
    gpu_name,
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
SKEWED = ", skew "
"""Between a shape and its load in the names of skewed records."""
SONICMOE = ("sonicmoe", "sonicmoe compiled")
DIFFERS = ("command", "date", "processor")
"""Keys of the environment that merged runs need not share."""
PREPARE_S, AT_ONCE = 200.0, 6
"""The child of a shape compiles for one or two minutes on one core, and uses up to 20 GB of GPU memory."""


def labels(toy: bool) -> list[str]:
    return [TOY] if toy else list(dict.fromkeys([*PAPER, *peer_figures()["shapes"]]))


@functools.cache
def load(label: str, wanted: tuple[str, ...], skew: float | None) -> tuple[Problem, dict[str, Callable[[], Step]]]:
    """A shape and its candidates. Each candidate is made once, so that the one that `prepare` compiled is timed."""
    shape, device = labelled(label), "cuda" if on_gpu() else "cpu"
    ids = random_ids(shape, device) if skew is None else skewed(shape.tokens, shape.experts, shape.top_k, skew)
    problem = Problem(shape, ids, device=device)
    made = select(problem.ours() | problem.fused_modes() | problem.peers() | {"bmm": problem.bmm}, wanted)
    return problem, {name: functools.cache(make) for name, make in made.items()}


def prepare(job: str, args: argparse.Namespace) -> None:
    """Run every candidate once, which compiles its kernels. A failure counts only if it happens again when timed."""
    for name, make in load(labels(args.toy)[int(job)], tuple(args.candidates), args.skew)[1].items():
        with candidate(f"{job}/{name}"):
            make().total()
    if on_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    problem, made = load(labels(args.toy)[int(job)], tuple(args.candidates), args.skew)
    times, memory = check_and_time(job, problem, made, struck, args.rounds, queued=True)
    if times:
        label = problem.shape.label if args.skew is None else f"{problem.shape.label}{SKEWED}{args.skew:g}"
        emit(shape=label, flops=problem.shape.forward_flops, memory=memory, times=times)
    load.cache_clear()


def rates(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """TFLOP/s of forward, backward, total and eager total, by candidate."""
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
    """The name of SonicMoE's faster candidate when called as `how`; None if neither ran."""
    ran = [name for name in SONICMOE if times.get(f"{how}/{name}")]
    return min(ran, key=lambda name: median(times[f"{how}/{name}"]), default=None)


def against_sonicmoe(record: Mapping[str, Any]) -> dict[str, float]:
    """Speed of fused over SonicMoE's faster candidate, queued and eager, and bytes held over SonicMoE's fewest."""
    times, memory, out = record["times"], record["memory"], {}
    for how in ("queued", "eager"):
        if (ratio := speed(times, f"{how}/fused", f"{how}/{fastest_sonicmoe(times, how)}")) is not None:
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
    """fused over SonicMoE at the measured shapes of the paper: by shape, least and geometric mean."""
    by_shape = {r["shape"]: found for r in records if "queued" in (found := against_sonicmoe(r))}
    shown = {shape: row for shape, row in by_shape.items() if shape.partition(SKEWED)[0] in PAPER}
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
    print(f"geometric mean {means['queued']:.3f}× queued, {means['eager']:.3f}× eager, least {least:.3f}×")
    return {"shapes": shown, "mean": means["queued"], "eager mean": means["eager"], "least": least}


def summarise(records: Sequence[Mapping[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print and return the table, unless the gate is red or the run is void. Adds the reasons to gate.void."""
    gate.report()
    by_shape = {r["shape"]: rates(r) for r in records}
    measured = []
    for r in records:
        table, sonic = by_shape[r["shape"]], fastest_sonicmoe(r["times"])
        counted = {name: name for name in (*PEERS, "bmm") if name in table} | ({"sonicmoe": sonic} if sonic else {})
        measured += [
            (r["shape"], peer, phase, value) for peer, name in counted.items() for phase, value in table[name].items()
        ]
    gate.void += [r for r in void_reasons(measured, peer_figures(), gpu_name()) if r not in gate.void]
    for reason in gate.void:
        print(f"VOID, no speed-up: {reason}")
    if not gate.green or gate.void:
        return {}
    shapes = {}
    print("\nTFLOP/s forward / backward / total (eager total), MiB held; then the speeds of auto and fused over it")
    for r in records:
        table = by_shape[r["shape"]]
        print(r["shape"])
        rows = {}
        for name, row in table.items():
            held = r["memory"].get(name, {}).get("held")
            ratios = [speed(r["times"], f"queued/{mine}", f"queued/{name}") for mine in ("auto", "fused")]
            rows[name] = {**row, "held": held, "auto_speed": ratios[0], "fused_speed": ratios[1]}
            space = cells([held and held / 2**20], "6.0f")
            print(f"  {name:17s} {row['forward']:5.0f} / {row['backward']:5.0f} / {row['total']:5.0f} "
                  f"(eager {row['eager']:5.0f}) {space} MiB {cells(ratios, '6.2f', '×')}")  # fmt: skip
        shapes[r["shape"]] = rows
    return {"shapes": shapes, "sonicmoe": compare(records)}


def taken_on(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The common environment of several runs, given by file. A version may be missing in some of the runs.

    Raises:
        ValueError: commits, GPUs or versions differ. The message names the files.
    """
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for result in results.values() for key in result["environment"]):
        files: dict[Any, list[str]] = {}
        for file, result in results.items():
            files.setdefault(result["environment"].get(key), []).append(file)
        if key not in ("commit", "gpu"):
            files.pop(None, None)  # a package that this run had not installed
        if len(files) > 1 and key not in DIFFERS:
            told = (f"{value} in {', '.join(names)}" for value, names in sorted(files.items(), key=lambda f: len(f[1])))
            raise ValueError(
                f"{key} is {' but '.join(told)}: only runs of one commit, GPU and set of versions are merged"
            )
        common[key] = max(files, default=None)  # the latest date
    return common


def merged(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs, given by file, as one: records, gate, environment. A shape comes from the latest run that has it.

    Raises:
        ValueError: see `taken_on`.
    """
    common = taken_on(results)
    red: set[str] = set()
    gate, records = Gate(red.__contains__), {}
    for file, result in sorted(results.items(), key=lambda item: item[1]["environment"].get("date", "")):
        judged = result["gate"]
        if judged["green"]:
            gate.take({"good": file, "error": judged["largest_error"]})
        else:
            red |= {f"{file}: {key}" for key in judged["red"] or ("nothing checked",)}
        gate.failures |= dict.fromkeys(red - set(gate.failures), "red")
        gate.failures |= {f"{file}: {key}": why for key, why in judged.get("failures", {}).items()}
        records |= {record["shape"]: record for record in result["records"]}
        gate.void += result["void"]
    return {"records": list(records.values()), "gate": gate, "environment": common}


def main() -> int:
    parser = parser_of(__doc__, seconds=590.0)
    parser.add_argument("--shapes", default="", help="numbers of the shapes, from 0; default: all")
    add_names(parser, "--candidates", (*OURS, *FUSED_MODES, *PEER_LAYERS, "bmm"), help="only these, by name")
    parser.add_argument("--skew", type=float, help="load of the fullest expert over the mean; default: random routing")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE.json", help="merge these results")
    parser.add_argument("--toy", action="store_true", help="one small shape, for a CPU")
    args = parser.parse_args()
    jobs = chosen(parser, "--shapes", args.shapes, [str(i) for i in range(len(labels(args.toy)))])
    most = min(shape.experts / shape.top_k for shape in (labelled(labels(args.toy)[int(job)]) for job in jobs))
    if args.skew is not None and not 1 <= args.skew <= most:
        parser.error(f"--skew={args.skew:g}: must be in [1, {most:g}], E / K of these shapes")
    if dry_run():
        for job in jobs:
            print(f"{job}: T,H; I/E/K = {labels(args.toy)[int(job)]}")
        return 0
    if args.merge:
        try:
            one = merged({str(path): read_result(path) for path in args.merge})
        except (FileNotFoundError, ValueError) as e:
            raise SystemExit(f"peers.py: {e}") from e
        gate, records, environment = one["gate"], one["records"], one["environment"]
        out = args.out or result_path("peers", environment["gpu"])
        summary = summarise(records, gate)
        write_result(out, "peers", gate=gate, summary=summary, records=records, taken_on=environment)
        print(f"wrote {out}")
        return 0 if gate.green and not gate.void else 1
    return run_benchmark(
        args, "peers", jobs, run_job, prepare=prepare, toy=args.toy,
        first=lambda runner: runner.prepare(jobs, seconds=PREPARE_S, at_once=AT_ONCE),
        quiet=150.0, budget=300.0,  # quiet: a peer may build a CUDA extension on first use
        ours=lambda key: "/" not in key or kind(key.rsplit("/", 1)[1]) in OURS,  # a lost job is ours, too
        summarise=summarise, out=args.out or result_path("peers", gpu_name()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
