"""Quantized saved activations: bytes kept for backward, errors of the gradients, and the cost in time.

    python benchmarks/quant.py [--out DIR] [--tokens T] [--repeats N]

A dMoE layer: on a GPU in bfloat16 with the paper's XS size (hidden 512, width 2048, 64 experts, top-1), on a CPU in
float32 and small. mlp_impl "grouped" and "sparse", gelu and swiglu. For each quantizer and number of bits:

    saved    how many bytes less autograd keeps than without the quantizer (each storage counts once)
    errors   ‖dW − dW without‖ / ‖dW without‖ for each weight
    ms       forward and backward, median, and the same without quantizers, in turn

Also the GB/s of the two kernels and of torch's copy. The exit status is 1 if the error of a single quantizer exceeds
1e-2 at 8 bits or 1e-1 at 4 bits. Writes quant.json. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Gate, dry_run, interleave, milliseconds, option_parser, relative_error, write_result

from megablocks import MoEConfig, dMoE
from megablocks.ops.quant.quant import dequantize, packed_bytes, quantize

QUANTIZERS = ("inputs", "rematerialize", "scatter")
BOUND = {8: 1e-2, 4: 1e-1}
IMPLS, ACTIVATIONS = ("grouped", "sparse"), ("gelu", "swiglu")
SIZES = {"cuda": dict(hidden=512, width=2048, experts=64), "cpu": dict(hidden=64, width=128, experts=8)}


def cases() -> list[tuple[str, str, int, tuple[str, ...]]]:
    names = [(name,) for name in QUANTIZERS] + [QUANTIZERS]
    return [(impl, act, bits, n) for impl in IMPLS for act in ACTIVATIONS for bits in (8, 4) for n in names]


def measure(impl: str, activation: str, bits: int, names: tuple[str, ...], tokens: int, device: str) -> Any:
    """(gradients by name, bytes kept, a step to time) of one layer."""
    size = SIZES[device]
    config = MoEConfig(
        hidden_size=size["hidden"], ffn_hidden_size=size["width"], num_experts=size["experts"], activation=activation,
        mlp_impl=impl, init_std=size["hidden"] ** -0.5, **{f"quantize_{name}_num_bits": bits for name in names},
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = dMoE(config, seed=0, device=device, dtype=dtype)
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer.forward_with_aux(x)[0]
    kept = sum(nbytes for nbytes, _ in storages.values())
    storages.clear()
    y.backward(dy)
    grads = {name.removeprefix("experts."): p.grad.clone() for name, p in layer.named_parameters()}

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer.forward_with_aux(x)[0].backward(dy)

    return grads, kept, step


def predicted(impl: str, activation: str, bits: int, names: tuple[str, ...], tokens: int, device: str) -> int | None:
    """The bytes that one quantizer saves, with codes and scales counted, for top-1; None for several quantizers."""
    hidden, width, experts = SIZES[device].values()
    value, rows, used = (2 if device == "cuda" else 4), tokens, tokens
    if impl == "sparse":  # pads the rows of every expert to blocks of 128, and keeps whole blocks of pre-activations
        rows = -(-tokens // 128) * 128 + (experts - 1) * 128
        used = rows // 128 * 128

    def less(rows: int, width: int) -> int:
        return rows * width * value - packed_bytes(bits, rows, width)

    gates = 2 if activation == "swiglu" else 1
    return {
        # "grouped" keeps no gathered rows: it shares the tokens that the router keeps anyway
        ("inputs",): less(rows, hidden) if impl == "sparse" else -packed_bytes(bits, tokens, hidden),
        ("rematerialize",): gates * less(used, width) + used * width * value,
        ("scatter",): less(rows, hidden),
    }.get(names)


def measure_kernels(rows: int, width: int, repeats: int) -> list[dict[str, Any]]:
    """GB/s of both kernels and of a copy, in bfloat16."""

    def gb(run: Callable[[], object], nbytes: int) -> float:
        milliseconds(run, 3)
        return nbytes / milliseconds(run, repeats) / 1e6

    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    result = []
    for bits in (8, 4):
        codes, scales = quantize(x, bits)
        moved = x.nbytes + packed_bytes(bits, rows, width)
        result.append({
            "rows": rows, "width": width, "bits": bits,
            "quantize_gb_s": gb(lambda bits=bits: quantize(x, bits), moved),
            "dequantize_gb_s": gb(lambda c=codes, s=scales, bits=bits: dequantize(c, s, bits, width, x.dtype), moved),
            "copy_gb_s": gb(lambda: out.copy_(x), 2 * x.nbytes),
        })  # fmt: skip
    return result


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quant"), help="folder for the results")
    parser.add_argument("--tokens", type=int, help="default: 65536 on a GPU, 512 on a CPU")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs per case")
    options = parser.parse_args()
    if options.repeats < 1 or (options.tokens is not None and options.tokens < 1):
        parser.error(f"--repeats={options.repeats}, --tokens={options.tokens}: must be >= 1")
    if dry_run():
        for impl, activation, bits, names in cases():
            print(f"{impl:8} {activation:7} bits={bits} {'+'.join(names)}")
        return 0

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = options.tokens or (65536 if device == "cuda" else 512)
    plain: dict[tuple[str, str], Any] = {}
    gate = Gate(lambda key: True)

    def write(**summary: Any) -> None:
        summary = {"tokens": tokens, **SIZES[device], "within_bounds": gate.green, **summary}
        write_result(options.out / "quant.json", "quant", gate=gate, summary=summary, records=rows)

    rows = []
    print(f"{'impl':8} {'act':7} bits {'quantized':13} {'kept MB':>8} {'saved MB':>8} {'ms':>7} {'plain':>7}  errors")
    for impl, activation, bits, names in cases():
        if (impl, activation) not in plain:
            plain = {(impl, activation): measure(impl, activation, -1, (), tokens, device)}
        expected, kept_plain, plain_step = plain[impl, activation]
        grads, kept, step = measure(impl, activation, bits, names, tokens, device)
        timers = {"plain": partial(milliseconds, plain_step), "quantized": partial(milliseconds, step)}
        ms_plain, ms = map(median, interleave(timers, options.repeats, warm_up=2).values())
        errors = {n: relative_error(grads[n], g) for n, g in expected.items()}  # infinite for NaN
        name = names[0] if len(names) == 1 else "all three"
        worst, key = max(errors.values()), f"{impl}/{activation}/{bits}/{name}"
        gate.judge(key, worst, BOUND[bits] if len(names) == 1 else math.inf)
        row = dict(impl=impl, activation=activation, bits=bits, quantised=name, kept=kept, saved=kept_plain - kept)
        row["predicted"] = predicted(impl, activation, bits, names, tokens, device)
        rows.append(row | dict(ms=ms, ms_plain=ms_plain, errors=errors))
        shown = " ".join(f"{n.removesuffix('.layer.weight')} {e:.4f}" for n, e in errors.items())
        print(
            f"{impl:8} {activation:7} {bits:4d} {name:13} {kept / 1e6:8.1f} {(kept_plain - kept) / 1e6:8.1f} "
            f"{ms:7.2f} {ms_plain:7.2f}  {shown}",
            flush=True,
        )
        write()  # after each case, so that an interrupted run leaves its results
    kernels = []
    for width in (512, 2048) if device == "cuda" else ():
        kernels += measure_kernels(tokens, width, 50)
    for k in kernels:
        print(
            f"{k['rows']} x {k['width']} at {k['bits']} bits: quantize {k['quantize_gb_s']:.0f} GB/s, "
            f"dequantize {k['dequantize_gb_s']:.0f}, copy {k['copy_gb_s']:.0f}"
        )
    write(kernels=kernels)
    return 0 if gate.report() else 1


if __name__ == "__main__":
    sys.exit(main())
