"""Projection and cross entropy of a language model, forward and backward: ours, Megatron's, liger-kernel's.

    python benchmarks/loss.py [--rounds N] [--out FILE.json]

bf16, hidden 768, random labels, one token of 16 masked. `plain` is what Megatron does without a fused loss: logits in
bf16, then in float32, whose softmax is saved. `ours` keeps 4 GiB of logits for backward, `recompute` none, `keep` all.
`liger` is LigerFusedLinearCrossEntropyFunction where it is installed: the sum of the losses with gradients in forward,
dW in float32; `liger none` gives a loss per token and computes all logits again.

The gradients of each candidate are first compared with float32. Prints milliseconds, TFLOP/s of the three products
that are needed, and the peak of memory beside operands and results; then µs and bandwidth of our two kernels. DRY_RUN=1
prints the cases.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import (
    TOLERANCE,
    Gate,
    cells,
    dry_run,
    gpu_name,
    interleave,
    milliseconds,
    need_gpu,
    option_parser,
    relative_error,
    result_path,
    write_result,
)

from megablocks.ops.loss import CHUNK_BYTES, KEEP_BYTES, linear_cross_entropy

HIDDEN = 768
CASES = [(tokens, words) for words in (32768, 51200) for tokens in (32768, 131072)]
KEPT = {"ours": None, "recompute": 0, "keep": 2**62}  # bytes
NAMES = ("plain", *KEPT, "liger", "liger none")
TRUTH_ROWS = 4096


def plain_loss(x: Any, weight: Any, labels: Any) -> Any:
    """The loss of each token by the steps of Megatron's VocabParallelCrossEntropy, on one rank."""

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            wide = logits.float()
            wide -= wide.amax(1, keepdim=True)
            chosen = wide.gather(1, labels[:, None]).squeeze(1)
            torch.exp(wide, out=wide)
            total = wide.sum(1)
            wide.div_(total[:, None])
            ctx.save_for_backward(wide)
            return total.log() - chosen

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (softmax,) = ctx.saved_tensors
            softmax[torch.arange(len(labels), device=labels.device), labels] -= 1
            return softmax.mul_(grad[:, None]).bfloat16()

    return CrossEntropy.apply(x @ weight.t())


class Case:
    """Operands of one size, and a function by name that returns dx and dW."""

    def __init__(self, tokens: int, words: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(words, HIDDEN, device="cuda") * HIDDEN**-0.5
        self.weight = weight.bfloat16().requires_grad_()
        self.labels = torch.randint(words, (tokens,), device="cuda")
        self.mask = (torch.arange(tokens, device="cuda") % 16 != 0).float()

    def gradients(self, name: str) -> Callable[[], tuple[Any, ...]]:
        x, weight, labels = self.x, self.weight, self.labels

        def loss() -> Any:
            if name == "plain":
                return (plain_loss(x, weight, labels) * self.mask).sum()
            if name in KEPT:
                kept = KEPT[name]
                each = linear_cross_entropy(x, weight, labels, keep_bytes=KEEP_BYTES if kept is None else kept)
                return (each * self.mask).sum()
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

            known, reduction = torch.where(self.mask > 0, labels, -100), "none" if name == "liger none" else "sum"
            options = (None, None, -100, 0.0, 0.0, reduction, None, False, torch.float32)
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, known, *options)[0].sum()

        return lambda: torch.autograd.grad(loss(), (x, weight))

    def truth(self) -> tuple[Any, Any]:
        """dx and dW with float32 logits, in chunks."""
        weight, parts = self.weight.detach().float(), []
        dw = torch.zeros_like(weight)
        for rows, labels, mask in zip(
            self.x.detach().split(TRUTH_ROWS), self.labels.split(TRUTH_ROWS), self.mask.split(TRUTH_ROWS), strict=True
        ):
            grad = (rows.float() @ weight.t()).softmax(1)
            grad[torch.arange(len(labels), device="cuda"), labels] -= 1
            grad *= mask[:, None]
            parts.append(grad @ weight)
            dw += grad.t() @ rows.float()
        return torch.cat(parts), dw


def peak_bytes(fn: Callable[[], tuple[Any, ...]]) -> int:
    """The most memory that a call takes beside what was there and what it returns."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = fn()
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results)


def kernels(words: int, rounds: int) -> dict[str, float]:
    """µs of the two kernels on a chunk of logits."""
    from megablocks.ops.loss_triton import gradient_launch, sums_launch

    rows = CHUNK_BYTES // (2 * words)
    logits = torch.randn(rows, words, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(words, (rows,), device="cuda")
    maximum, total, _ = sums_launch(logits, labels)
    grad = torch.ones_like(total)
    timers = {
        "sums": lambda: 1e3 * milliseconds(lambda: sums_launch(logits, labels), 10, head_start_ms=5),
        "gradient": lambda: (
            1e3 * milliseconds(lambda: gradient_launch(logits, labels, maximum, total, grad), 10, head_start_ms=5)
        ),
    }
    times = {name: median(spent) for name, spent in interleave(timers, rounds).items()}
    for name, passes in (("sums", 1), ("gradient", 2)):
        print(f"  {name:9} {times[name]:8.1f} µs {passes * logits.nbytes / times[name] / 1e6:6.2f} TB/s")
    return times


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if dry_run():
        for tokens, words in CASES:
            print(f"T, H, V = {tokens}, {HIDDEN}, {words}: {', '.join(NAMES)}")
        return 0
    need_gpu()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    names = [name for name in NAMES if has_liger or not name.startswith("liger")]
    gate, records = Gate(ours=lambda key: key.split("/")[1] in KEPT), []
    for tokens, words in CASES:
        case = Case(tokens, words)
        truth, right, peaks = case.truth(), {}, {}
        for name in names:
            key, fn = f"{tokens},{words}/{name}", case.gradients(name)
            try:
                error = max(map(relative_error, fn(), truth))
                peaks[name] = peak_bytes(fn)
            except torch.OutOfMemoryError:
                gate.take({"bad": key, "why": "out of memory"})
                continue
            if gate.judge(key, error, TOLERANCE):
                right[name] = fn
        del truth
        times = interleave({name: lambda fn=fn: milliseconds(fn) for name, fn in right.items()}, options.rounds)
        print(f"T, H, V = {tokens}, {HIDDEN}, {words}:        ms  TFLOP/s   GiB")
        for name, spent in times.items():
            rate = 6e-9 * tokens * words * HIDDEN / median(spent)
            print(f"  {name:22} {cells([median(spent), rate, peaks[name] / 2**30], '8.2f')}")
        record = {"tokens": tokens, "words": words, "hidden": HIDDEN, "times": times, "peak_bytes": peaks}
        records.append(record | {"kernels_us": kernels(words, options.rounds)})
        del case, right
        torch.cuda.empty_cache()
    gate.report()
    out = options.out or result_path("loss", gpu_name())
    write_result(out, "loss", gate=gate, summary={}, records=records)
    print(f"wrote {out}")
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
