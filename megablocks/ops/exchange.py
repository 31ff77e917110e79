"""Exchange rows between the GPUs of one host, without counts and without the host: to the experts' ranks and back.

    rows, ids, weight = to_experts(exchange, x, weight, expert)   each token once to every rank with one of its experts
    y = to_home(exchange, partial, ids, expert)                   y[t] = Σ over the ranks of their sums for token t

Legend: W ranks, T tokens of a rank, M >= T the most tokens of any rank, H hidden, K choices a token, E' local experts.

Every rank must run the same sequence of exchanges on one stream. Each function is the other's backward: the gradient of
`x` is the sum of what the ranks send home, and the gradient of `partial` is what the tokens' ranks send to the experts.
Sums over the ranks are float32 and in rank order, so reruns are bit-identical.
exchange_triton.py has the kernels and explains why nothing is overwritten too early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megablocks.ops import exchange_triton as kernels
from megablocks.ops.launch import cdiv, interpreted, next_power_of_2
from megablocks.ops.library import once_differentiable
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch_op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED = 256
_STAYS = "The step's result is NaN, and so is every later one until all ranks restart"


def _round_up(n: int) -> int:
    return cdiv(n, _ALIGNED) * _ALIGNED


class Layout:
    """The layout of each rank's buffer: two halves of rows, ids and values, then the flags.

    num_bytes: size of the buffer, which must be zeros before the first exchange.
    """

    def __init__(self, ranks: int, max_tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
        self.ranks, self.max_tokens, self.hidden, self.top_k, self.dtype = ranks, max_tokens, hidden, top_k, dtype
        self.chunks = cdiv(max_tokens, kernels.CHUNK)
        slots = ranks * max_tokens
        self.ids_at = _round_up(slots * hidden * dtype.itemsize)
        self.values_at = self.ids_at + _round_up(slots * top_k * 4)
        self.half_bytes = self.values_at + _round_up(slots * top_k * 4)
        self.flags_at = 2 * self.half_bytes
        self.num_bytes = self.flags_at + _round_up(ranks * self.chunks * 4)


class Exchange:
    """One rank's end of the buffers.

    Args:
        layout: of every rank's buffer.
        rank: this rank.
        addresses: of the ranks' buffers, as this process sees them.
        device: of this rank.
        experts: E', on each rank.
        max_rows: most rows for the experts of a rank; more are a fault, see `check`. Default W·M·K, the most possible.
        limit_s: how long a kernel waits for a peer.
        delay_ns: only for tests: time between a push's data and its flag.
    """

    def __init__(
        self, layout: Layout, rank: int, addresses: Sequence[int], device: torch.device, experts: int, *,
        max_rows: int | None = None, limit_s: float = 600.0, delay_ns: int = 0,
    ) -> None:  # fmt: skip
        size = layout
        self.layout, self.rank, self.experts = layout, rank, experts
        self.num_pairs = size.ranks * size.max_tokens * size.top_k
        self.max_rows = self.num_pairs if max_rows is None else min(max_rows, self.num_pairs)
        self.limit_s, self.delay_ns = limit_s, delay_ns
        # The kernels write a fault to `alarm`; the host reads it without a synchronization.
        self.alarm = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._peers = torch.tensor([*addresses, self.alarm.data_ptr()], dtype=torch.int64, device=device)
        self._sent, self._taken = torch.zeros(2, size.ranks * size.chunks, dtype=torch.int32, device=device)
        self._state = torch.zeros(1, dtype=torch.int32, device=device)
        slot = torch.arange(size.ranks * size.max_tokens, dtype=torch.int32, device=device)
        self._token = slot.repeat_interleave(size.top_k)

    def check(self) -> None:
        """Raise if a kernel that has run reported a fault. Does not synchronize.

        A fault is permanent. The other ranks do not see it, and after a time-out the ranks no longer agree on the
        number of the next exchange.

        Raises:
            RuntimeError: a peer sent nothing in time, or more rows arrived than `max_rows`.
        """
        kind, rows = self.alarm.tolist()
        if kind > self.layout.ranks:
            raise RuntimeError(
                f"max_rows={self.max_rows}: {rows} rows arrived for this rank's experts; raise dispatch_rows_factor or "
                f"balance the load. {_STAYS}"
            )
        if kind:
            raise RuntimeError(
                f"rank {kind - 1} of the expert group sent nothing for {self.limit_s:g} s, waited for by rank "
                f"{self.rank}: see its log. {_STAYS}"
            )

    def _common(
        self, part: str, block: int, warps: int, registers: int | None = None
    ) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """The turns of a grid, and the kernels' last arguments (see exchange_triton.py)."""
        size = self.layout
        lag, choices = min(kernels.LAG, size.chunks), next_power_of_2(size.top_k)
        numbers = (
            size.max_tokens, self.rank, self.experts, size.chunks, lag, int(part != "read"), int(part != "push"),
            size.hidden, size.top_k, size.half_bytes, size.ids_at, size.values_at, size.flags_at,
        )  # fmt: skip
        options = {
            "WORLD": size.ranks, "CHUNK": kernels.CHUNK, "CHOICES": choices, "UNROLL": min(choices, kernels.UNROLL),
            "BLOCK": min(next_power_of_2(size.hidden), block), "DELAY": self.delay_ns, "num_warps": warps,
            "maxnreg": registers,
            "LIMIT": 0 if interpreted() else math.ceil(self.limit_s * 1e9),  # without a GPU there is no clock to read
        }  # fmt: skip
        return size.chunks + lag, numbers, options

    def to_experts(
        self, x: Tensor, ids: Tensor, values: Tensor | None, local_ids: Tensor | None = None, *, part: str = "both"
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Send tokens to the ranks of their experts, and receive the tokens of the experts here.

        Args:
            x, ids: (T, H) contiguous rows, (T, K) int32 global ids.
            values: (T, K) float32 that are sent with the ids; None with local_ids.
            local_ids: (W·M, K) of an earlier exchange with the same ids; None sends the ids.
            part: "push" and "read" run one half, for one process that simulates the ranks one after the other.

        Returns:
            rows (W·M, H), unspecified for a token without an expert here; local_ids and values (W·M, K).
        """
        size, (turns, numbers, options) = self.layout, self._common(part, 512, 4)
        slots = size.ranks * size.max_tokens
        rows = x.new_empty(slots, size.hidden)
        local_values = None if values is None else values.new_empty(slots, size.top_k)
        with_ids = local_ids is None
        if local_ids is None:
            local_ids = ids.new_empty(slots, size.top_k)
        kernels.to_experts_kernel[(turns * (2 * size.ranks - 1),)](
            x, x.stride(0), ids, values, rows, local_ids, local_values, self._peers, self._sent, self._taken,
            self._state, ids.shape[0], *numbers, IDS=with_ids, **options,
        )  # fmt: skip
        return rows, local_ids, local_values

    def to_home(
        self, partial: Tensor, local_ids: Tensor, ids: Tensor, values: Tensor | None, dispatch: Dispatch | None = None,
        weight: Tensor | None = None, *, part: str = "both",
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Send rows home, and sum those of this rank's tokens.

        Args:
            partial: (W·M, H) contiguous; with `dispatch` the rows (R, H) from which `combine` would compute it.
            local_ids, ids: (W·M, K) and (T, K), a result and an argument of `to_experts`.
            values: (W·M, K) float32 of the local ids, or None.
            dispatch, weight: `combine`'s other arguments; weight (W·M·K,) float32, None for ones.

        Returns:
            y (T, H); values (T, K), each from its expert's rank.
        """
        size, block, warps, registers = self.layout, 512, 4, None
        if dispatch is not None:  # sums wait for memory: few registers let many programs run at once
            block, warps, registers = (128, 4, 64) if size.hidden <= 1024 else (256, 8, 64)
        turns, numbers, options = self._common(part, block, warps, registers)
        indices = (None,) * 3 if dispatch is None else (dispatch.token_offsets, dispatch.scatter, dispatch.pair)
        y = partial.new_empty(ids.shape[0], size.hidden)
        y_values = None if values is None else values.new_empty(ids.shape)
        kernels.to_home_kernel[(turns * size.ranks,)](
            partial, weight, *indices, local_ids, values, ids, y, y_values, self._peers, self._sent, self._taken,
            self._state, ids.shape[0], *numbers, **options,
        )  # fmt: skip
        return y, y_values

    def dispatch(self, local_ids: Tensor) -> Dispatch:
        """The indices of W·M tokens over the local experts, with at most `max_rows` rows."""
        built = Dispatch(*build_dispatch_op(self._token, local_ids.flatten(), local_ids.shape[0], self.experts))
        if self.max_rows == self.num_pairs:
            return built
        offsets, scatter, n = torch.empty_like(built.expert_offsets), torch.empty_like(built.scatter), self.max_rows
        kernels.limit_kernel[(cdiv(self.num_pairs, 1024),)](
            built.expert_offsets, built.scatter, offsets, scatter, self._peers, self._state, self.experts, n,
            self.num_pairs, WORLD=self.layout.ranks, BLOCK=1024, EXPERTS=next_power_of_2(self.experts + 1),
        )  # fmt: skip
        return Dispatch(offsets, built.token_offsets, built.gather[:n], scatter, built.pair[:n])


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ids: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        rows, local_ids, local_weight = exchange.to_experts(x, ids, weight)
        assert local_weight is not None
        ctx.exchange = exchange
        ctx.save_for_backward(ids, local_ids)
        ctx.mark_non_differentiable(local_ids)
        return rows, local_ids, local_weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (ids, local_ids), (d_rows, _, d_weight) = ctx.saved_tensors, grads
        return *ctx.exchange.to_home(d_rows.contiguous(), local_ids, ids, d_weight.contiguous()), None, None


class _ToHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, local_ids: Tensor, ids: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(ids, local_ids)
        return exchange.to_home(partial.contiguous(), local_ids, ids, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ids, local_ids = ctx.saved_tensors
        return ctx.exchange.to_experts(grads[0].contiguous(), ids, None, local_ids)[0], None, None, None


def to_experts(exchange: Exchange, x: Tensor, weight: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its experts.

    Args:
        exchange: for T <= M tokens, H and K.
        x: (T, H).
        weight: (T, K) float32.
        expert: (T, K) int32; outside [0, E) is "no expert".

    Returns:
        rows (W·M, H), row r·M + t is token t of rank r, unspecified if it has no expert here; local ids (W·M, K)
        int32, -1 if the expert is on another rank; weights (W·M, K), 0 there. Differentiable in x and weight.
    """
    return _ToExperts.apply(x, weight, expert, exchange)


def to_home(exchange: Exchange, partial: Tensor, local_ids: Tensor, expert: Tensor) -> Tensor:
    """Sum what the ranks computed for each token, on the token's own rank.

    Args:
        partial: (W·M, H), the sums over this rank's experts; read only if a token has an expert here.
        local_ids, expert: a result and an argument of `to_experts`.

    Returns:
        (T, H), zeros for a token without an expert. Differentiable in partial.
    """
    return _ToHome.apply(partial, local_ids, expert, exchange)
