"""The cases of grouped_gemm.py: shapes, operands, comparison with float32, and the candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from measure import relative_error

from megablocks.ops.permute.rows import combine
from megablocks.ops.routing.dispatch import build_dispatch, make_routing

SHAPES = {  # T, H, I, E, K
    "S0": (40960, 768, 256, 128, 8),
    "S1": (24576, 1536, 256, 128, 8),
    "S3": (24576, 1536, 1024, 32, 2),
    "S4": (32768, 4096, 256, 256, 16),
    "S2": (32768, 4096, 512, 128, 8),
    "S5": (32768, 4096, 1024, 128, 8),
    "S6": (16384, 4096, 14336, 8, 2),
}
OPS = ("up", "down", "dx", "dx2", "dw1", "dw2", "layer")
PRODUCTS = ("up", "down", "dx")
GATHERED = ("up", "dw1", "dw2", "layer")
QUACK_TILES = {  # tile_M, tile_N, pingpong, cluster_M, cluster_N: QuACK's default tile on Hopper and similar ones
    "quack-pp192": (128, 192, True, 2, 1),
    "quack-c256x128": (256, 128, False, 2, 1),
    "quack-c256x192": (256, 192, False, 2, 1),
    "quack-pp128": (128, 128, True, 2, 1),
    "quack-c128x256": (128, 256, False, 2, 1),
}


class Problem:
    """The operands of one product, and the float32 truth of a few experts."""

    def __init__(self, shape: str, op: str, tokens: int | None = None) -> None:
        T, H, inner, E, K = SHAPES[shape]
        T = tokens or T
        self.op, self.E, self.R, self.inner = op, E, T * K, inner
        generator = torch.Generator("cuda").manual_seed(0)
        score = torch.rand(T, E, device="cuda", generator=generator)
        weight, ids = score.topk(K, dim=1)
        self.dispatch = build_dispatch(make_routing(ids, weight, E))
        self.weight = weight.flatten()
        self.offsets, self.gather = self.dispatch.expert_offsets, self.dispatch.gather

        def rand(*size: int) -> Any:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1

        R = self.R
        self.gathered = op in GATHERED
        if op in ("up", "layer"):
            self.a, self.w = rand(T, H), rand(E, 2 * inner, H).transpose(1, 2)
        elif op == "down":
            self.a, self.w = rand(R, inner), rand(E, inner, H)
        elif op == "dx":
            self.a, self.w = rand(R, 2 * inner), rand(E, 2 * inner, H)
        elif op == "dx2":
            self.a, self.a2 = rand(R, inner), rand(R, inner)
            self.w, self.w2 = rand(E, inner, H), rand(E, inner, H)
        elif op == "dw1":
            self.a, self.b = rand(R, 2 * inner), rand(T, H)
        else:
            self.a, self.b = rand(R, inner), rand(T, H)
        if op == "layer":
            self.down = rand(E, inner, H)
        self.flops = 2 * R * H * inner * {"down": 1, "dw2": 1, "layer": 3}.get(op, 2)

    def check(self, out: Any) -> float:
        """Largest relative error of a few experts or tokens; inf if any value is NaN."""
        if bool(out.isnan().any()):
            return float("inf")
        if self.op == "layer":
            return self._check_layer(out)
        worst = 0.0
        bounds = self.offsets.tolist()
        for e in sorted({0, 1, self.E // 2, self.E - 1}):
            lo, hi = bounds[e], bounds[e + 1]
            index = self.gather[lo:hi].long()
            if self.op in ("dw1", "dw2"):
                got, truth = out[e], self.a[lo:hi].float().T @ self.b[index].float()
            else:
                rows = (self.a[index] if self.gathered else self.a[lo:hi]).float()
                got, truth = out[lo:hi], rows @ self.w[e].float()
                if self.op == "dx2":
                    truth += self.a2[lo:hi].float() @ self.w2[e].float()
            worst = max(worst, relative_error(got, truth))
        return worst

    def _check_layer(self, out: Any) -> float:
        """The error of the first tokens, computed pair by pair."""
        d, worst = self.dispatch, 0.0
        for token in range(3):
            truth = torch.zeros(out.shape[1], device="cuda")
            for slot in range(int(d.token_offsets[token]), int(d.token_offsets[token + 1])):
                row = int(d.scatter[slot])
                e = int(torch.searchsorted(self.offsets[1:], row, right=True))
                z = (self.a[token].float() @ self.w[e].float()).bfloat16().float()[: self.inner]
                truth += self.weight[int(d.pair[row])] * (z @ self.down[e].float())
            worst = max(worst, relative_error(out[token], truth))
        return worst

    def ours(self) -> Callable[[], Any]:
        from megablocks.ops.grouped import grouped_mm_hopper as hopper

        offsets, gather = self.offsets, self.gather if self.gathered else None
        if self.op in PRODUCTS:
            return lambda: hopper.ragged_m(self.a, self.w, offsets, gather)
        if self.op in ("dw1", "dw2"):
            from megablocks.ops.grouped.grouped_mm_hopper_dw import ragged_k

            return lambda: ragged_k(self.a, self.b, offsets, gather)
        if self.op == "dx2":
            return lambda: hopper.ragged_m(self.a, self.w, offsets, x2=self.a2, v=self.w2)

        def layer() -> Any:
            z = hopper.ragged_m(self.a, self.w, offsets, gather)
            return combine(hopper.ragged_m(z[:, : self.inner], self.down, offsets), self.weight, self.dispatch)

        return layer

    def apart(self) -> Callable[[], Any]:
        """dx2 as two products and a sum."""
        from megablocks.ops.grouped.grouped_mm_hopper import ragged_m

        return lambda: ragged_m(self.a, self.w, self.offsets) + ragged_m(self.a2, self.w2, self.offsets)

    def torch_take(self) -> Callable[[], Any]:
        """torch's `layer` that reads the K rows of each token, instead of index_add with its atomics."""
        ends, index, back = self.offsets[1:], self.gather.long(), self.dispatch.scatter.long()
        tokens = self.a.shape[0]
        weight = self.weight.view(tokens, 1, -1).bfloat16()

        def layer() -> Any:
            z = torch._grouped_mm(self.a.index_select(0, index), self.w, offs=ends)
            y = torch._grouped_mm(z[:, : self.inner], self.down, offs=ends)
            return torch.bmm(weight, y.index_select(0, back).view(tokens, -1, y.shape[1])).squeeze(1)

        return layer

    def torch_grouped(self) -> Callable[[], Any]:
        ends, index = self.offsets[1:], self.gather.long()
        if self.op == "layer":
            weight = self.weight[self.dispatch.pair.long()].bfloat16()[:, None]

            def layer() -> Any:
                z = torch._grouped_mm(self.a.index_select(0, index), self.w, offs=ends)
                y = torch._grouped_mm(z[:, : self.inner], self.down, offs=ends)
                return torch.zeros_like(self.a).index_add_(0, index, y * weight)

            return layer
        if self.op in ("dw1", "dw2"):
            rows = self.b[index]
            return lambda: torch._grouped_mm(self.a.t(), rows, offs=ends)
        rows = self.a[index] if self.gathered else self.a
        if self.op == "dx2":
            return lambda: torch._grouped_mm(rows, self.w, offs=ends).add_(
                torch._grouped_mm(self.a2, self.w2, offs=ends)
            )
        return lambda: torch._grouped_mm(rows, self.w, offs=ends)

    def bmm(self) -> Callable[[], Any]:
        """As many FLOPs with R / E rows for every expert. Its result cannot be compared."""
        per = self.R // self.E
        if self.op in PRODUCTS:
            rows = torch.randn(self.E, per, self.w.shape[1], device="cuda", dtype=torch.bfloat16) * 0.1
            return lambda: torch.bmm(rows, self.w)
        a = self.a[: per * self.E].view(self.E, per, -1).transpose(1, 2)
        b = torch.randn(self.E, per, self.b.shape[1], device="cuda", dtype=torch.bfloat16) * 0.1
        return lambda: torch.bmm(a, b)

    def quack(self, tile: tuple[int, int, bool, int, int]) -> Callable[[], Any]:
        from quack.gemm import gemm

        m, n, pingpong, cluster_m, cluster_n = tile
        common = dict(tile_M=m, tile_N=n, cluster_M=cluster_m, cluster_N=cluster_n, pingpong=pingpong, persistent=True)
        if self.op in PRODUCTS:
            index = self.gather if self.gathered else None

            def product() -> Any:
                out = torch.empty(self.R, self.w.shape[2], device="cuda", dtype=torch.bfloat16)
                gemm(self.a, self.w.mT, out, None, None, cu_seqlens_m=self.offsets, A_idx=index, **common)
                return out

            return product

        def gradient() -> Any:
            out = torch.empty(self.E, self.a.shape[1], self.b.shape[1], device="cuda", dtype=torch.bfloat16)
            gemm(self.b.T, self.a.T, out.mT, None, None, cu_seqlens_k=self.offsets, A_idx=self.gather, **common)
            return out

        return gradient

    def all(self, peers: Collection[str]) -> dict[str, Callable[[], Callable[[], Any]]]:
        made: dict[str, Callable[[], Callable[[], Any]]] = {}
        single = self.op in (*PRODUCTS, "dw1", "dw2")
        if "bmm" in peers and single:
            made["bmm"] = self.bmm
        if "torch" in peers:
            made["torch"] = self.torch_grouped
        made["ours"] = self.ours
        if self.op == "dx2":
            made["apart"] = self.apart
        if "torch" in peers and self.op == "layer":
            made["torch-take"] = self.torch_take
        if "quack" in peers and single:
            for name, tile in QUACK_TILES.items():
                made[name] = lambda tile=tile: self.quack(tile)
        return made
