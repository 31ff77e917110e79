"""The 18 products of block_sparse.py: operands, the ways to compute them, and the check against float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = {"XS": (65536, 512, 2048, 64), "Small": (32768, 768, 3072, 64), "Medium": (8192, 1024, 4096, 64)}
FEW_TOKENS = (1024, 512, 256, 8)
PRODUCTS = ("sdd", "dsd", "sdd_t", "dst_d", "dsd_t", "ddt_s")


def tiles(product: str) -> dict[str, Any]:
    """Tiles to time beside the one that the ops choose by themselves."""
    from megablocks.ops.sparse.hopper import Tile

    out = {
        "pp6": Tile(128, 128, 6, pingpong=True, out_parts=4, out_buffers=2),
        "pp6h": Tile(128, 128, 6, pingpong=True, out_parts=2),
        "pp5": Tile(128, 128, 5, pingpong=True, out_parts=2, out_buffers=2),
        "pp2k": Tile(128, 128, 2, pingpong=True, out_parts=2, out_buffers=2, BK=128),
        "pp3k": Tile(128, 128, 3, pingpong=True, out_parts=4, out_buffers=2, BK=128),
    }
    if product == "ddt_s":
        return out | {"tall4": Tile(128, 128, 4, out_parts=2), "tall3": Tile(128, 128, 3)}
    return out | {"wide4": Tile(64, 256, 4, out_parts=2), "wide3": Tile(64, 256, 3, out_parts=2, out_buffers=2)}


def zipf_counts(tokens: int, experts: int) -> Any:
    """Tokens of each expert, drawn with probability ∝ 1 / rank, the ranks shuffled over the experts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    drawn = torch.multinomial(weight, tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=experts)[torch.randperm(experts, generator=generator)]


class Case:
    """One product at one size and routing: operands, truth and candidates."""

    def __init__(self, product: str, size: tuple[int, int, int, int], routing: str) -> None:
        import torch

        from megablocks.ops.sparse import topology

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
        # each operand read once, the result written once
        self.bytes = 2 * (self.bounds[-1] * H + E * F * H + self.blocks * 128 * 128)
        generator = torch.Generator("cuda").manual_seed(1)

        def rand(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1

        self.x = rand(self.pattern.shape[0], H)
        self.x[self.bounds[-1] :] = float("nan")  # rows beyond the last expert's are room: nothing may read them
        self.w = rand(H, E * F) if product in ("sdd", "dsd_t") else rand(E * F, H)
        self.s = None
        if not product.startswith("sdd"):
            data = rand(self.pattern.num_blocks, 128, 128)
            data[self.blocks :] = float("nan")
            self.s = self.pattern.with_data(data)

    def ours(self) -> Any:
        from megablocks.ops.sparse import dds, dsd, sdd

        if self.product == "sdd":
            return sdd(self.x, self.w, self.pattern).data
        if self.product == "sdd_t":
            return sdd(self.x, self.w.t(), self.pattern).data
        if self.product == "dsd":
            return dsd(self.s, self.w)
        if self.product == "dsd_t":
            return dsd(self.s, self.w.t())
        return dsd(self.s.t(), self.x) if self.product == "dst_d" else dds(self.x.t(), self.s)

    def launch(self, module: Any, **options: Any) -> Any:
        """The same through hopper.py or kernels.py directly."""
        p = self.pattern
        if self.s is None:
            w = self.w if self.product == "sdd" else self.w.t()
            return module.sdd(self.x, w, p.row_indices, p.column_indices, p.offsets, **options)
        by_row, by_column = (p.row_work, p.column_indices, None), (p.column_work, p.column_indices_t, p.block_offsets_t)
        data = self.s.data
        if self.product in ("dsd", "dsd_t"):
            return module.spmm(data, self.w if self.product == "dsd" else self.w.t(), *by_row, True, **options)
        if self.product == "dst_d":
            return module.spmm(data, self.x, *by_column, True, **options)
        return module.spmm(data, self.x.t(), *by_column, False, **options)

    def hopper(self, tile: Any) -> Callable[[], Any]:
        from megablocks.ops.sparse import hopper

        more = {"run": self.pattern.run} if self.s is None else {}
        return lambda: self.launch(hopper, tile=tile, **more)

    def twin(self) -> Any:
        from megablocks.ops.sparse import kernels

        return self.launch(kernels, **({"block_size": 128} if self.s is None else {}))

    def with_activation(self, fused: bool) -> Callable[[], Any]:
        """sdd with gelu, or sdd_t times gelu's slope, in the product's epilogue or by a pass of its own.

        Checked as the bare product: forward that is what is returned, backward the slope at 8 is 1.
        """
        import torch

        from megablocks.ops.activation import activation_backward_op, activation_op
        from megablocks.ops.sparse.mlp import sdd_activate_op, sdd_slope_op

        p, x, last = self.pattern, self.x, ("gelu", "tanh")
        how = list(p.indices), p.block_size, p.run, *last
        if self.product == "sdd":
            if fused:
                return lambda: sdd_activate_op(x, self.w, None, *how)[0]
            return lambda: (pre := self.ours(), activation_op(pre, None, *last))[0]
        z = torch.full((p.num_blocks, 128, 128), 8.0, device="cuda", dtype=x.dtype)
        if fused:
            return lambda: sdd_slope_op(x, self.w.t(), z, *how)
        return lambda: activation_backward_op(self.ours(), z, None, *last)[0]

    def stk(self) -> Callable[[], Any]:
        import stk

        matrix = (self.s or self.pattern).to_stk()
        x, w, product = self.x[: self.bounds[-1]], self.w, self.product
        if self.s is None:
            return lambda: stk.ops.sdd(x, w if product == "sdd" else w.t(), matrix).data
        if product in ("dsd", "dsd_t"):
            return lambda: stk.ops.dsd(matrix, w if product == "dsd" else w.t())
        return (lambda: stk.ops.dsd(matrix.t(), x)) if product == "dst_d" else (lambda: stk.ops.dds(x.t(), matrix))

    def bmm(self) -> Callable[[], Any]:
        """Every expert's product of the same sizes as one batch; each expert's operands contiguous."""
        import torch

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
        """Largest relative error of an expert's part against float32, over all experts; inf where it is NaN."""
        import torch

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
                got, want = out[lo:hi].float(), dense(self.s.data) @ (w if self.product == "dsd" else w.t())
            elif self.product == "dst_d":
                got, want = out[columns].float(), dense(self.s.data).t() @ x
            else:
                got, want = out[:, columns].float(), x.t() @ dense(self.s.data)
            off = float((got - want).norm() / want.norm().clamp_min(1e-20)) if want.numel() else 0.0
            worst = max(worst, off if off == off else float("inf"))
        if self.product in ("dsd", "dsd_t") and not bool((out[self.bounds[-1] :] == 0).all()):
            return float("inf")  # block rows without blocks must come out as zeros
        torch.cuda.synchronize()
        return worst

    def candidates(self, sweep: bool, stk: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
        """What to time: makers, because a candidate's operands are made only if it runs."""
        made: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: self.ours}
        if self.routing == "uniform":
            made["bmm"] = self.bmm
            if sweep:
                made["triton"] = lambda: self.twin
                if self.s is None:
                    made["act fused"] = lambda: self.with_activation(fused=True)
                    made["act apart"] = lambda: self.with_activation(fused=False)
                for name, tile in tiles(self.product).items():
                    made[name] = lambda tile=tile: self.hopper(tile)
            if stk:
                made["stk"] = self.stk
        return made
