"""Expert parallelism between the GPUs of one host, through memory that they all address (NVLink).

    x (T, H) ─ to_experts ─▶ rows (W·M, H) ─ sort by local expert, experts ─▶ partial (W·M, H) ─ to_home ─▶ y (T, H)

A token is sent once per rank, not once per expert. Nothing waits for the host, so a CUDA graph can capture the layer.
`megablocks.ops.exchange` contains the exchanges. All sizes are static, set by `max_tokens` and `rows_factor`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.config import refuse
from megablocks.moe.dispatchers import AllToAllDispatcher, ExpertCompute
from megablocks.moe.experts import Experts
from megablocks.ops.exchange import DTYPES, Exchange, Layout, to_experts, to_home
from megablocks.ops.fused.remote import Remote
from megablocks.ops.library import runs_triton, under_autocast
from megablocks.ops.routing.dispatch import Routing

_TILE = 128
_log = logging.getLogger(__name__)


def limit_s() -> float:
    """Return how many seconds a GPU waits for another rank's rows: MEGABLOCKS_EXCHANGE_TIMEOUT, or 600 if unset.

    Raises:
        ConfigError: the variable is not such a number.
    """
    text = os.environ.get("MEGABLOCKS_EXCHANGE_TIMEOUT") or "600"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e9:  # the kernels count nanoseconds in 64 bits
            return float(text)
    refuse("MEGABLOCKS_EXCHANGE_TIMEOUT", text, "must be a number of seconds, > 0 and <= 1e9, such as 600")


class SymmetricDispatcher(AllToAllDispatcher):
    """Exchanges rows through symmetric memory, or by all-to-all where that is impossible.

    Every rank of the group must call it equally often, on one stream, with at most `max_tokens` tokens. The first call
    with a size is a collective that synchronizes. Later calls do not.

    Args:
        max_tokens: M, the largest number of tokens of a rank. A rank's buffer has 4·W·M·H bytes in bf16; layers share
            it.
        rows_factor: rows that a rank's experts accept, as a multiple of M·K; above W it counts as W. If more arrive,
            the output is NaN, and the next call raises.
        strict: raise an error if the exchange is impossible, instead of falling back.
        others: those of `AllToAllDispatcher`.
    """

    def __init__(
        self, group: ProcessGroup, num_experts: int, *, max_tokens: int, rows_factor: float = 2.0, strict: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        limit_s()  # refuses a bad one before the ranks wait for one another
        super().__init__(group, num_experts, **others)
        self.max_tokens, self.rows_factor, self.strict = max_tokens, rows_factor, strict

    @torch.compiler.disable  # a compiler must not see addresses of other processes' memory
    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are.

        Raises:
            ValueError: T > max_tokens; with strict, what prevents the exchange.
            RuntimeError: an earlier call failed on the GPU, see `Exchange.check`.
        """
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"x: has {x.shape[0]} tokens, must have at most max_tokens={self.max_tokens}")
        (x,) = under_autocast(x)
        exchange = self._exchange(x, routing)
        if exchange is None:
            return super().run(x, routing, experts)
        exchange.check()
        expert = routing.expert.view(-1, exchange.layout.top_k)
        weight = routing.weight.view(expert.shape)
        if isinstance(experts, Experts) and experts.takes_remote(x):
            return experts(x, Remote(exchange, expert), weight)
        rows, local_ids, weight = to_experts(exchange, x, weight, expert)
        partial = experts(rows, exchange.dispatch(local_ids), weight.flatten())
        return to_home(exchange, partial, local_ids, expert)

    def _exchange(self, x: Tensor, routing: Routing) -> Exchange | None:
        """Return the exchange for these tokens, or None to fall back. All ranks get the same answer."""
        why = self._refusal(x, routing)
        opened = why or self._open(x.device, x.dtype, x.shape[1], routing.top_k or 0)
        if isinstance(opened, Exchange):
            return opened
        if self.strict:
            raise ValueError(f"dispatcher='symmetric': {opened}; use 'auto' or 'all_to_all'")
        return None

    def _refusal(self, x: Tensor, routing: Routing) -> str | None:
        """Return why these tokens cannot be exchanged; None if they can. All ranks get the same answer."""
        if not runs_triton(x) or x.dtype not in DTYPES or routing.weight.dtype != torch.float32:
            return f"it takes bf16, fp16 or float32 tokens on a GPU, not {x.dtype} on {x.device.type}"
        if routing.top_k is None:
            return "it needs a fixed number of experts per token"
        if self.ffn_shards > 1:
            return f"it cannot split an expert over ranks, ffn_shards={self.ffn_shards}"
        return None

    def _open(self, device: torch.device, dtype: torch.dtype, hidden: int, top_k: int) -> Exchange | str:
        """Return the exchange of these sizes, or the reason why the ranks cannot exchange rows this way.

        The first call of a size is a collective. Layers of one size share the result.
        """
        max_rows = math.ceil(self.rows_factor * self.max_tokens * top_k / _TILE) * _TILE
        key = (self.group, self.num_experts, self.max_tokens, hidden, top_k, dtype, max_rows)
        if key not in _opened:
            layout = Layout(self.size, self.max_tokens, hidden, top_k, dtype)
            _opened[key] = opened = _rendezvous(self.group, layout, device, self.shard.num_local_experts, max_rows)
            if isinstance(opened, str):
                _log.warning("experts exchange rows by all-to-all, not through symmetric memory: %s", opened)
        return _opened[key]


_opened: dict[tuple[Any, ...], Exchange | str] = {}
_buffers: list[tuple[Tensor, object]] = []  # never freed, because other ranks address them


def _rendezvous(
    group: ProcessGroup, layout: Layout, device: torch.device, experts: int, max_rows: int
) -> Exchange | str:
    """Allocate this rank's buffer and get the addresses of the other buffers, or return why that is impossible."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # unique for each running system, unlike a host name
    hosts = _gather(boot.read_text() if boot.exists() else "unknown", group)
    if len(set(hosts)) > 1 or "unknown" in hosts:
        return "the ranks are not all on one host"
    problem, handle = "", None
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        buffer.zero_()
        handle = symmetric.rendezvous(buffer, group)
        _buffers.append((buffer, handle))
    except (ImportError, AttributeError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
    problems = _gather(problem, group)  # it also makes ranks wait until every buffer is zero
    if any(problems) or handle is None:
        return next(p for p in problems if p)
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return Exchange(layout, group.rank(), handle.buffer_ptrs, device, experts, max_rows=max_rows, limit_s=limit_s())


def _gather(value: str, group: ProcessGroup) -> list[str]:
    values = [""] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
