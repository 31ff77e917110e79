"""Would e4m3 pay? Experts of two models with about 110 and 235 billion parameters, forward and backward, beside bf16.

    python benchmarks/fp8.py --out FOLDER [--shapes small,L,Q] [--seconds 150]

The recipe is DeepSeek-V3's: activations in groups of 1 × 128, weights in blocks of 128 × 128, float32 scales, sums
promoted to float32 every 128 of K. SwiGLU, uniform random routing, one GPU. Arms:

    bf16           our fused op, `fused_mlp`, with all gradients
    fp8 + bf16 dW  four quantizing passes; the products forward and of dX in e4m3, those of dW in bfloat16

Quantizing the weights, both ways round, is timed apart, because a step of several micro-batches does it once.
fp8_kernels.py has the passes, fp8_hopper.py the products. torch's _grouped_mm and _scaled_grouped_mm (one scale a row)
show what other kernels gain from fp8. `bounds` are the times that perfect kernels of the same passes would need: the
longer of arithmetic and bytes, summed over the passes.

Gate: relative errors of each arm's results, against float64 in "small" and against bf16 else, below 0.1; those of the
products, against float32 products of the same e4m3 values, below 1e-2. FOLDER/fp8.json is written job by job. DRY_RUN=1
prints the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import fp8_kernels as fp8
import torch
from children import add_names, candidate, parser_of, run_benchmark, struck_off
from grouped_gemm import timer
from measure import Gate, dry_run, emit, gpu_name, interleave, milliseconds, on_gpu, relative_error, speed
from torch.nn.functional import silu

from megablocks.monitor.flops import peak_bandwidth, peak_flops
from megablocks.ops.activation_table import Activation
from megablocks.ops.fused.mlp import ExpertParameters, down_gradient_op, fused_mlp, fused_up_op
from megablocks.ops.grouped.gathered_mm import gathered_mm_dw_op, grouped_mm_op, grouped_mm_sum_op
from megablocks.ops.permute.rows import combine_op
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.testing.poison import poisoned_empty

# T, H, I, E, K. L: Llama-4-Scout (109B), few experts and long products. Q: Qwen3-235B-A22B, many and short ones.
# The last expert of "small" has no rows. "toy" is for a CPU.
SHAPES = {
    "toy": (40, 128, 128, 3, 1),
    "small": (1000, 512, 256, 6, 2),
    "L": (16384, 5120, 8192, 16, 1),
    "Q": (16384, 4096, 1536, 128, 8),
}
SMALL = ("toy", "small")
PRODUCT_ERROR, LAYER_ERROR = 1e-2, 0.1
PRODUCTS = ("up", "down", "dA", "dX")
"""Those in e4m3."""
RESULTS = ("y", "dx", "d_weight", "dw1", "dw2")
REFERENCE = "fp8 by float32 products"
FP8 = "fp8 + bf16 dW"
ARMS = ("bf16", FP8)
MICRO_BATCHES = (1, 4)
GO = 1.15


class Case:
    """Tensors of a shape. w: (w1, v1, w2), (E, I, H) each."""

    def __init__(self, name: str) -> None:
        T, H, width, E, K = SHAPES[name]
        device = "cuda" if on_gpu() else "cpu"
        torch.manual_seed(0)

        def rand(*size: int, scale: float = 1.0) -> Any:
            return torch.randn(*size, device=device, dtype=torch.bfloat16).mul_(scale)

        self.x, self.dy, self.weight = rand(T, H), rand(T, H), torch.rand(T * K, device=device)
        self.w = *(rand(E, width, H, scale=H**-0.5) for _ in range(2)), rand(E, width, H, scale=width**-0.5)
        ids = torch.rand(T, E - (name in SMALL), device=device).topk(K, 1).indices
        self.dispatch = build_dispatch(make_routing(ids, self.weight.view(T, K), E))
        self.offsets, self.gather = self.dispatch.expert_offsets, self.dispatch.gather

    def quantize_weights(self) -> dict[str, Any]:
        (up, up_t), (down, down_t) = (fp8.quantize_weights(*w) for w in (self.w[:2], self.w[2:]))
        return {"up": up, "dX": up_t, "dA": down, "down": down_t}

    def bf16(self) -> tuple[Any, ...]:
        """The results named in RESULTS; dw1 has dV1 below dW1."""
        leaves = [t.detach().requires_grad_() for t in (self.x, self.weight, *self.w)]
        x, weight, w1, v1, w2 = leaves
        y = fused_mlp(x, weight, self.dispatch, ExpertParameters(w1, v1, w2), Activation("swiglu"))
        dx, d_weight, dw1, dv1, dw2 = torch.autograd.grad(y, leaves, self.dy)
        return y, dx, d_weight, (dw1, dv1), dw2

    def fp8(self, wq: dict[str, Any], product: Callable[..., Any], keep: dict[str, Any] | None = None) -> Any:
        """As `bf16`. keep: gets what each product multiplies."""

        def multiply(name: str, *operands: Any) -> Any:
            if keep is not None:
                keep[name] = operands
            return product(*operands)

        d = self.dispatch
        z = multiply("up", fp8.quantize_rows(self.x), wq["up"], self.offsets, self.gather)
        y = combine_op(multiply("down", fp8.quantize_rows(z, gated=True), wq["down"], self.offsets), self.weight, d)
        d_act = multiply("dA", fp8.quantize_rows(self.dy), wq["dA"], self.offsets, self.gather)
        backward = d_act, z, self.weight, d.pair
        if keep is not None:
            keep["SwiGLU"] = backward
        dz8, dz, scaled, d_weight = fp8.swiglu_backward(*backward)
        del z, d_act, backward
        dx = combine_op(multiply("dX", dz8, wq["dX"], self.offsets), None, d)
        return y, dx, d_weight, gathered_mm_dw_op(dz, self.x, d), gathered_mm_dw_op(scaled, self.dy, d)

    def bf16_parts(self, z: Any, d_act: Any) -> dict[str, Callable[[], Any]]:
        """The kernels of `bf16`, by product; "up" and "dA" contain the activation and its gradient."""
        d, (w1, v1, w2), swiglu = self.dispatch, self.w, Activation("swiglu")
        pre, gate = (half.contiguous() for half in z.chunk(2, 1))
        rows = grouped_mm_op(d_act, w2, self.offsets)
        return {
            "up": lambda: fused_up_op(self.x, w1, v1, None, None, d, swiglu),
            "down": lambda: grouped_mm_op(d_act, w2, self.offsets),
            "dA": lambda: down_gradient_op(self.dy, w2, pre, gate, self.weight, d, swiglu),
            "dX": lambda: grouped_mm_sum_op(pre, w1, gate, v1, self.offsets),
            "dW1": lambda: [gathered_mm_dw_op(t, self.x, d) for t in (pre, gate)],
            "dW2": lambda: gathered_mm_dw_op(d_act, self.dy, d),
            "combine": lambda: combine_op(rows, self.weight, d),
        }

    def fp8_passes(self, keep: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        z = keep["SwiGLU"][1]
        return {
            "quantize x": lambda: fp8.quantize_rows(self.x),
            "SwiGLU": lambda: fp8.quantize_rows(z, gated=True),
            "its gradient": lambda: fp8.swiglu_backward(*keep["SwiGLU"]),
            "quantize weights": self.quantize_weights,
        }

    def torch_products(self) -> dict[str, Callable[[], Any]]:
        """The up-projection of rows gathered before: torch's grouped product, in e4m3 with one scale a row."""
        rows, w, root = self.x[self.gather], torch.cat(self.w[:2], 1), self.x.shape[1] ** 0.5
        rows8, w8 = rows.to(torch.float8_e4m3fn), (w * root).to(torch.float8_e4m3fn)
        scales = rows.new_ones(rows.shape[0]).float(), rows.new_full(w.shape[:2], 1 / root).float()
        options = {"offs": self.offsets[1:], "out_dtype": torch.bfloat16}
        return {
            "torch bf16": lambda: torch._grouped_mm(rows, w.mT, **options),
            "torch fp8": lambda: torch._scaled_grouped_mm(rows8, w8.mT, *scales, use_fast_accum=True, **options),
        }

    def float64(self) -> tuple[Any, ...]:
        x, weight, *w = (t.double().requires_grad_() for t in (self.x, self.weight, *self.w))
        y, offsets, d = torch.zeros_like(x), self.offsets.tolist(), self.dispatch
        for e in range(len(offsets) - 1):
            rows = slice(offsets[e], offsets[e + 1])
            token = d.gather[rows].long()
            act = silu(x[token] @ w[0][e].T) * (x[token] @ w[1][e].T)
            y = y.index_add(0, token, weight[d.pair[rows].long()].unsqueeze(1) * (act @ w[2][e]))
        dx, d_weight, dw1, dv1, dw2 = torch.autograd.grad(y, (x, weight, *w), self.dy.double())
        return y, dx, d_weight, (dw1, dv1), dw2


def errors(got: tuple[Any, ...], want: tuple[Any, ...]) -> dict[str, float]:
    """Of each result; of the weights' gradients at most the first 8 experts count, which float32 copies fit."""

    def part(t: Any) -> Any:
        t = torch.cat([half[:8] for half in t], 1) if isinstance(t, tuple) else t
        return t[:8] if t.dim() == 3 else t

    return {n: relative_error(part(a).float(), part(b).float()) for n, a, b in zip(RESULTS, got, want, strict=True)}


def bounds(name: str, gpu: str) -> dict[str, float] | None:
    """Milliseconds of each arm, and of quantizing the weights, by the data sheet; None for another GPU than Hopper."""
    bf16_rate, bandwidth = peak_flops(gpu), peak_bandwidth(gpu)
    if bf16_rate is None or bandwidth is None or not any(known in gpu for known in ("H100", "H200")):
        return None
    e4m3_rate = 2 * bf16_rate
    T, H, width, E, K = SHAPES[name]
    X, A, Y, W = T * H, T * K * width, T * K * H, E * width * H  # values of x, act, the rows of y, one weight
    product, both = 2 * A * H, 2 * (2 * Y + 2 * X)  # FLOPs; bytes of the two combines
    # (FLOPs, bytes) of each kernel with a product, then bytes of the passes
    dw16 = [(2 * product, 4 * A + 2 * X + 4 * W), (product, 2 * A + 2 * X + 2 * W)]
    rest8 = [(2 * product, X + 2 * W + 4 * A), (product, A + W + 2 * Y), (product, X + W + 2 * A),
             (2 * product, 2 * A + 2 * W + 2 * Y)]  # fmt: skip
    rest16 = [(2 * product, 2 * X + 4 * W + 6 * A), (product, 2 * A + 2 * W + 2 * Y),
              (product, 2 * X + 2 * W + 10 * A), (2 * product, 4 * A + 4 * W + 2 * Y)]  # fmt: skip
    passes8 = both + 6 * X + 5 * A + 14 * A  # rows of x and dY; SwiGLU; its gradient

    def ms(bf16: list[tuple[int, int]], e4m3: list[tuple[int, int]], moved: int) -> float:
        kernels = [(f / rate, b) for of, rate in ((bf16, bf16_rate), (e4m3, e4m3_rate)) for f, b in of]
        return 1e3 * (sum(max(seconds, b / bandwidth) for seconds, b in kernels) + moved / bandwidth)

    return {
        "bf16": ms(rest16 + dw16, [], both),
        FP8: ms(dw16, rest8, passes8),
        "quantize weights": ms([], [], 12 * W),
    }


def time_job(job: str, struck: set[str], args: Any) -> None:
    """Check everything, then time the parts and the layers."""
    case, found = Case(job), {}
    truth = case.float64() if job in SMALL else None
    allowed = LAYER_ERROR if on_gpu() else 0.25  # Triton's interpreter rounds to e4m3 without the carry

    def check(arm: str, run: Callable[[], Any]) -> bool:
        """Compare an arm's results; those of bf16 are the truth of larger shapes."""
        nonlocal truth
        key = f"{job}/{arm}"
        if struck_off(key, struck):
            return False
        with candidate(key):
            with poisoned_empty():
                got = run()
            truth = truth or got
            found[arm] = errors(got, truth)
            if (worst := max(found[arm].values())) >= allowed:
                raise ArithmeticError(f"relative errors {found[arm]}")
            emit(good=key, error=worst)
            return True
        return False

    keep: dict[str, Any] = {}
    ok = check("bf16", case.bf16)
    wq = case.quantize_weights()
    if not (check(REFERENCE, lambda: case.fp8(wq, fp8.rows_product_ref, keep)) and ok):
        return
    if on_gpu():
        from fp8_hopper import rows_product as product
    else:
        product = fp8.rows_product_ref
    parts: dict[str, Callable[[], Any]] = {}
    for name in PRODUCTS:
        key = f"{job}/{name}/fp8"
        if struck_off(key, struck):
            return
        with candidate(key):
            with poisoned_empty():
                got = product(*keep[name])
            if (error := relative_error(got, fp8.rows_product_ref(*keep[name]))) >= PRODUCT_ERROR:
                raise ArithmeticError(f"relative error {error:.1e}")
            parts[f"{name}/fp8"] = lambda name=name: product(*keep[name])
            emit(good=key, error=error)
    if len(parts) < len(PRODUCTS):
        return
    d_act, z, *_ = keep["SwiGLU"]
    parts |= {f"{n}/bf16": fn for n, fn in case.bf16_parts(z, d_act).items()}
    parts |= {f"{n}/pass": fn for n, fn in case.fp8_passes(keep).items()}
    with candidate(f"{job}/torch"):
        peers = case.torch_products()
        if (error := relative_error(*(fn() for fn in peers.values()))) >= allowed:
            raise ArithmeticError(f"relative error {error:.1e} of e4m3 against bf16")
        parts |= {f"up/{n}": fn for n, fn in peers.items()}
    timers = {}
    for part, fn in parts.items():
        if not struck_off(f"{job}/{part}", struck):
            with candidate(f"{job}/{part}"):
                fn()
                milliseconds(fn)
                timers[part] = timer(f"{job}/{part}", fn)
    times = interleave(timers, args.rounds)
    parts.clear(), timers.clear(), keep.clear()
    layers = {"bf16": case.bf16, FP8: lambda: case.fp8(wq, product), "quantize weights": case.quantize_weights}
    if not check(FP8, layers[FP8]):
        return
    truth = None
    timers = {name: timer(f"{job}/{name}", fn) for name, fn in layers.items()}
    emit(shape=job, sizes=SHAPES[job], errors=found, bounds=bounds(job, gpu_name() or ""),
         parts=times, layers=interleave(timers, args.rounds))  # fmt: skip


def gains(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each number of micro-batches a step: the gain of the layer, and of its bound."""
    rows, times, limit = [], record["layers"], record["bounds"]
    for n in MICRO_BATCHES:
        steps = [t + q / n for t, q in zip(times[FP8], times["quantize weights"], strict=True)]
        gain = speed({"fp8": steps, "bf16": times["bf16"]}, "fp8", "bf16")
        best = limit and limit["bf16"] / (limit[FP8] + limit["quantize weights"] / n)
        rows.append({"shape": record["shape"], "arm": FP8, "micro_batches": n, "gain": gain, "gain_of_bound": best,
                     "bf16_ms": median(times["bf16"]) / 1e3, "fp8_ms": median(steps) / 1e3,
                     "largest_error": max(record["errors"][FP8].values())})  # fmt: skip
    return rows


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the tables in markdown and return the gains, unless the gate is red."""
    if not gate.report():
        return {}
    rows = [row for record in records for row in gains(record)]
    print("\n| shape | arm | micro-batches a step | bf16 ms | fp8 ms | gain | gain of the bound | largest error |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        limit = f"{r['gain_of_bound']:.2f}" if r["gain_of_bound"] else "–"
        print(f"| {r['shape']} | {r['arm']} | {r['micro_batches']} | {r['bf16_ms']:.2f} | {r['fp8_ms']:.2f} "
              f"| {r['gain']:.2f} | {limit} | {r['largest_error']:.3f} |")  # fmt: skip
    for record in records:
        T, H, width, _, K = record["sizes"]
        print(f"\n| {record['shape']}, µs (TFLOP/s) | by | time |\n|---|---|---|")
        for part, times in record["parts"].items():
            name, by = part.split("/")
            flops = 2 * T * H * width * K * {"up": 2, "dX": 2, "dW1": 2, "down": 1, "dA": 1, "dW2": 1}.get(name, 0)
            rate = f" ({flops / median(times) / 1e6:.0f})" if flops else ""
            print(f"| {name} | {by} | {median(times):.0f}{rate} |")
        limits = ", ".join(f"{arm} {ms:.2f} ms" for arm, ms in (record["bounds"] or {}).items())
        print(f"\nbounds of {record['shape']}: {limits or 'not known for this GPU'}")
    for r in rows:
        if r["shape"] not in SMALL:
            print(f"{r['shape']}, {r['micro_batches']} micro-batches a step: {r['gain']:.2f}, bar {GO}: "
                  f"{'go' if r['gain'] >= GO else 'no go'}")  # fmt: skip
    return {"rows": rows}


def main() -> int:
    parser = parser_of(__doc__, seconds=150.0, rounds=7)
    add_names(parser, "--shapes", SHAPES, "small,L,Q")
    args = parser.parse_args()
    if dry_run():
        for job in args.shapes:
            print(f"{job:6} T, H, I, E, K = {SHAPES[job]}: {'; '.join(ARMS)}")
        return 0
    return run_benchmark(
        args, "fp8", args.shapes, time_job, quiet=30.0, budget=70.0, ours=lambda key: "torch" not in key,
        summarise=summarise, out=args.out / "fp8.json" if args.out else None, toy=args.shapes == ["toy"],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
