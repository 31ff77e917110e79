"""The 18 products of block_sparse.py: operands, candidates, and the comparison with float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import relative_error

from megablocks.ops.sparse import dds, dsd, sdd, topology

SIZES = {"XS": (65536, 512, 2048, 64), "Small": (32768, 768, 3072, 64), "Medium": (8192, 1024, 4096, 64)}
FEW_TOKENS = (1024, 512, 256, 8)
PRODUCTS = ("sdd", "dsd", "sdd_t", "dst_d", "dsd_t", "ddt_s")


def zipf_counts(tokens: int, experts: int) -> Any:
    """The number of tokens of each expert, drawn with probability ∝ 1 / rank, in a random order of the experts."""
    generator = torch.Generator().manual_seed(0)
    weight = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    drawn = torch.multinomial(weight, tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=experts)[torch.randperm(experts, generator=generator)]


class Case:
    """One product at one size and routing: operands, truth and candidates."""

    def __init__(self, product: str, size: tuple[int, int, int, int], routing: str) -> None:
        self.product, self.routing = product, routing
        self.T, self.H, self.F, self.E = T, H, F, E = size
        counts = torch.full((E,), T // E) if routing == "uniform" else zipf_counts(T, E)
        offsets = torch.zeros(E + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        rows = T // 128 if routing == "uniform" and T // E % 128 == 0 else None
        built = topology(offsets.cuda(), F, max_rows=T, block_rows=rows)
        self.pattern, self.bounds = built.pattern, built.padded_offsets.tolist()
        self.blocks = self.bounds[-1] // 128 * (F // 128)
        self.flops = 2 * 128 * 128 * H * self.blocks
        # each operand is read once, and the result written once
        self.bytes = 2 * (self.bounds[-1] * H + E * F * H + self.blocks * 128 * 128)
        generator = torch.Generator("cuda").manual_seed(1)

        def rand(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1

        self.x = rand(self.pattern.shape[0], H)
        self.x[self.bounds[-1] :] = float("nan")  # unused rows, which nothing may read
        self.w = rand(H, E * F) if product in ("sdd", "dsd_t") else rand(E * F, H)
        self.s = None
        if not product.startswith("sdd"):
            data = rand(self.pattern.num_blocks, 128, 128)
            data[self.blocks :] = float("nan")
            self.s = self.pattern.with_data(data)

    def ours(self) -> Any:
        w = self.w.t() if self.product in ("sdd_t", "dsd_t") else self.w
        if self.product in ("sdd", "sdd_t"):
            return sdd(self.x, w, self.pattern).data
        if self.product in ("dsd", "dsd_t"):
            return dsd(self.s, w)
        return dsd(self.s.t(), self.x) if self.product == "dst_d" else dds(self.x.t(), self.s)

    def bmm(self) -> Callable[[], Any]:
        """One batched product of the same sizes, with the operands of each expert contiguous."""
        E, F, H, m = self.E, self.F, self.H, self.T // self.E

        def rand(*shape: int) -> Any:
            return torch.randn(E, *shape, device="cuda", dtype=torch.bfloat16) * 0.1

        left, right = {
            "sdd": lambda: (rand(m, H), rand(H, F)),
            "sdd_t": lambda: (rand(m, H), rand(F, H).mT),
            "dsd": lambda: (rand(m, F), rand(F, H)),
            "dsd_t": lambda: (rand(m, F), rand(H, F).mT),
            "dst_d": lambda: (rand(m, F).mT, rand(m, H)),
            "ddt_s": lambda: (rand(m, H).mT, rand(m, F)),
        }[self.product]()
        return lambda: torch.bmm(left, right)

    def error(self, out: Any) -> float:
        """Largest relative error of one expert's part, over all experts, compared with float32; inf for NaN."""
        worst, F = 0.0, self.F
        blocks_per_row = F // 128
        for e in range(self.E):
            lo, hi = self.bounds[e], self.bounds[e + 1]
            columns = slice(e * F, (e + 1) * F)
            chunk = slice(lo // 128 * blocks_per_row, hi // 128 * blocks_per_row)
            x = self.x[lo:hi].float()

            def dense(data: Any, chunk: slice = chunk, lo: int = lo, hi: int = hi) -> Any:
                blocks = data[chunk].float().view((hi - lo) // 128, blocks_per_row, 128, 128)
                return blocks.transpose(1, 2).reshape(hi - lo, F)

            w = self.w[:, columns].float() if self.w.shape[0] == self.H else self.w[columns].float()
            if self.product in ("sdd", "sdd_t"):
                got, want = dense(out), x @ (w if self.product == "sdd" else w.t())
            elif self.product in ("dsd", "dsd_t"):
                got, want = out[lo:hi], dense(self.s.data) @ (w if self.product == "dsd" else w.t())
            elif self.product == "dst_d":
                got, want = out[columns], dense(self.s.data).t() @ x
            else:
                got, want = out[:, columns], x.t() @ dense(self.s.data)
            worst = max(worst, relative_error(got, want))
        if self.product in ("dsd", "dsd_t") and not bool((out[self.bounds[-1] :] == 0).all()):
            return float("inf")  # block rows without blocks must be zero
        return worst

    def candidates(self) -> dict[str, Callable[[], Callable[[], Any]]]:
        """Makers of the candidates, so that the operands of a candidate are made only if it runs."""
        made: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: self.ours}
        return made | {"bmm": self.bmm} if self.routing == "uniform" else made
