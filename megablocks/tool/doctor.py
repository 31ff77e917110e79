"""`doctor`: run every kernel family on this machine's GPU, compare it with float64, and time its products.

Each family of `env` computes small odd sizes, forward and gradients, in bfloat16. On a Hopper GPU the plain Triton
kernels run too, as with MEGABLOCKS_HOPPER=0. The products are then timed at a shape with a known speed.
Without a GPU the reference code is compared, in float32. Exit code 0: no error. 1: a family failed; a line names it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch

from megablocks.monitor.flops import of_device, peak_flops
from megablocks.ops.grouped.gathered_mm import gathered_mm_gated
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.hopper import is_available, switched_on
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.tool.cases import CASES, LIMITS, Case, errors
from megablocks.tool.commands import Parser, check_switches, in_one_line, progress
from megablocks.tool.env import WITH_HOPPER
from megablocks.tool.timing import milliseconds

EXPECTED_TFLOPS: dict[str, dict[str, float | None]] = {
    "up": {"H200 NVL": None, "H200": 626.0},
    "down": {"H200 NVL": None, "H200": 545.0},
}
"""Rates of the timed products, by words of the device name. Source: benchmarks/notes/grouped.md, "up S0", "down S0"."""
HEAD_START_MS = 2.0
"""The GPU waits this long before a product is timed, so that a slow host's launch does not count: it takes less."""
SLOW = 0.8
"""A product below this share of the expected rate counts as slow. Power limits change the rate by 5 to 10 %."""
PRODUCT = {"tokens": 40960, "hidden": 768, "width": 256, "experts": 128, "top_k": 8}
"""The shape S0 of benchmarks/notes/README.md: 0.9 GB of memory."""


def check(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return a family's result: the worst error and its limit, or the exception, and the seconds that it took."""
    started = time.perf_counter()
    progress(f"checking {name}")
    try:
        found = errors(case, device, dtype)
    except Exception as error:  # a kernel that does not compile or launch is a finding, not a crash
        return {"ok": False, "problem": in_one_line(error), "seconds": time.perf_counter() - started}
    only_exact = set(case.exact) == set(case.inputs)
    limit = case.limit or LIMITS[torch.float32 if only_exact else dtype]
    worst = max(found, key=lambda name: found[name])
    ok = found[worst] <= limit
    in_json = found[worst] if math.isfinite(found[worst]) else None  # JSON has no infinity
    verdict: dict[str, Any] = {"ok": ok, "worst": worst, "error": in_json, "limit": limit}
    if not ok:
        verdict["problem"] = f"{worst}: relative error {found[worst]:.2g}, allowed {limit:.2g}"
    return {**verdict, "seconds": time.perf_counter() - started}


def families(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the result of every family; also "NAME without Hopper" if the device has both kinds of kernels."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {name: check(name, case, device, dtype) for name, case in CASES.items()}
    if device.type == "cuda" and is_available(device.index or 0) and switched_on():
        with mock.patch.dict(os.environ, MEGABLOCKS_HOPPER="0"):
            found |= {f"{name} without Hopper": check(name, CASES[name], device, dtype) for name in WITH_HOPPER}
    return found


def gpu_milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of a call on the GPU. The expected rates do not include the host's time either."""
    return milliseconds(run, head_start_ms=HEAD_START_MS)


def speeds(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return TFLOP/s of the grouped products, their share of the chip's peak, and the expected TFLOP/s."""
    tokens, hidden, width, experts, top_k = PRODUCT.values()
    ids = torch.arange(tokens * top_k, device=device).remainder(experts).view(tokens, top_k)
    dispatch = build_dispatch(make_routing(ids, torch.ones(tokens, top_k, device=device), experts))
    x, act = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / columns**0.5
              for rows, columns in ((tokens, hidden), (tokens * top_k, width)))  # fmt: skip
    w1, v1, w2 = torch.randn(3, experts, width, hidden, device=device, dtype=torch.bfloat16).unbind()
    one = 2.0 * tokens * top_k * width * hidden
    runs: dict[str, tuple[float, Callable[[], Any]]] = {
        "up": (2 * one, lambda: gathered_mm_gated(x, w1.transpose(1, 2), v1.transpose(1, 2), dispatch)),
        "down": (one, lambda: grouped_mm(act, w2, dispatch.expert_offsets)),
    }
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name)
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for product, (flops, run) in runs.items():
            progress(f"timing {product}")
            times = [gpu_milliseconds(run) for _ in range(13)]
            rate = 1e3 * flops / median(times[3:])  # the first ones compile and warm up
            expected = of_device(EXPECTED_TFLOPS[product], name)
            ok = expected is None or rate >= SLOW * expected * 1e12
            found[product] = {
                "ok": ok,
                "tflops": rate / 1e12,
                "share_of_chip": None if peak is None else rate / peak,
                "expected_tflops": expected,
            }
            if not ok:
                found[product]["problem"] = f"slow: {rate / 1e12:.0f} TFLOP/s, expected {expected:.0f} on {name}"
    return found


def report(speed: bool = True) -> dict[str, Any]:
    """Return everything that `doctor` prints."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    compared = families(device)
    try:
        timed = speeds(device) if on_gpu and speed else {}
    except Exception as error:  # memory in use, or a kernel that fails, is a finding
        timed = {"products": {"ok": False, "problem": in_one_line(error)}}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "families": compared,
        "speeds": timed,
        "needs_a_gpu": [] if on_gpu else ["every Triton and Gluon kernel", "bfloat16", "speed"],
    }
    progress("")
    found["ok"] = all(one["ok"] for part in ("families", "speeds") for one in found[part].values())
    return found


def text_of(found: dict[str, Any]) -> str:
    lines = [f"device: {found['device']}"]
    for name, one in found["families"].items():
        said = f"{one['worst']}: {one['error']:.1e} of {one['limit']:.0e}" if one["ok"] else one["problem"]
        lines.append(f"{'ok' if one['ok'] else 'FAILED':<8}{name:<24}{one['seconds']:>6.1f} s  {said}")
    for name, one in found["speeds"].items():
        if "tflops" not in one:
            lines.append(f"{'FAILED':<8}{name:<24}{one['problem']}")
            continue
        share = "" if one["share_of_chip"] is None else f", {one['share_of_chip']:.0%} of the chip"
        expected = "" if one["expected_tflops"] is None else f", expected {one['expected_tflops']:.0f}"
        lines.append(f"{'ok' if one['ok'] else 'SLOW':<8}{name:<24}{one['tflops']:>6.0f} TFLOP/s{share}{expected}")
    if found["needs_a_gpu"]:
        lines.append(f"only the reference code ran; not checked without a GPU: {', '.join(found['needs_a_gpu'])}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = Parser("doctor", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="do not time the products")
    options = parser.parse_args(argv)
    check_switches()
    found = report(speed=not options.no_speed)
    print(json.dumps(found, indent=1) if options.json else text_of(found))
    for name, one in (found["families"] | found["speeds"]).items():
        if not one["ok"]:
            print(f"megablocks doctor: {name}: {one['problem']}", file=sys.stderr)
    return 0 if found["ok"] else 1
