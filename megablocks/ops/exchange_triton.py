"""Kernels that exchange rows between the GPUs of one host through memory that all of them address.

Legend: W ranks, T <= M tokens of a rank, H hidden, K choices a token, E' local experts. Slot (r, t) belongs to token t
of rank r.

  to the experts   push: x[t] goes to each rank p that holds one of t's experts, into p's slot (this rank, t)
                   take: rows (W·M, H) of the slots of this rank's buffer; its own tokens come from x itself
  home             push: partial[r, t] goes to rank r, into r's slot (this rank, t), where t has an expert here
                   total: y[t] = Σ over the ranks r with an expert of t, in rank order, of what r pushed

With a Dispatch (`sums`) the kernel computes partial itself, from the experts' rows of the slot. `combine` would write
it, and the exchange would read it again. The sum is bound by this GPU's memory and the push by the link: both overlap.

There are no counts: a slot depends only on rank and token. A program that pushes writes CHUNK tokens for one peer, then
that peer's flag of this chunk. A program that reads waits for the flag. A flag contains the number of the exchange,
which each side counts itself. So nothing depends on the host, and a CUDA graph can replay an exchange.

Pushing and reading programs alternate; each chunk is read LAG chunks after it was pushed. A GPU starts programs in the
order of the grid, which is the same on every rank. So the first unfinished program of any rank never waits for a push
that has not begun, and every program makes progress.

Exchanges use the two halves of the buffer in turn. Exchange n + 2 can overwrite exchange n: before it, this rank saw a
flag n + 1 of every peer, and a peer sets its flags n + 1 after it has read exchange n.

A wait ends after LIMIT ns. Then the peer's rank is written to `state` here and to `alarm` on the host, and later waits
end at once. All rows that go home and all totals become NaN, on other ranks too, so no optimizer step uses them.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megablocks.ops.launch import quick

CHUNK = 8
"""Tokens per flag."""
LAG = 512
"""Chunks between a push and its read: about as many programs as a GPU runs at once, so that few programs wait."""
UNROLL = 8
"""Most pairs of a slot that are read at once. A program reads their indices once, but those of more pairs per block."""


@triton.jit
def _wait(flag_ptr, number, source, peers_ptr, state_ptr, WORLD: tl.constexpr, LIMIT: tl.constexpr):
    """Wait until a flag reaches `number`. Returns whether it did."""
    seen = tl.load(flag_ptr, volatile=True)
    if LIMIT > 0:
        start = tl.extra.cuda.globaltimer()
        state = tl.load(state_ptr, volatile=True)
        while (seen < number) & (state == 0):
            seen = tl.load(flag_ptr, volatile=True)
            state = tl.load(state_ptr, volatile=True)
            if tl.extra.cuda.globaltimer() - start > LIMIT:
                state = source + 1
                tl.store(state_ptr, state)
                alarm = tl.load(peers_ptr + WORLD).to(tl.pointer_type(tl.int32))
                tl.store(alarm, state)
    # What the peer wrote before its flag is visible from here on. The result must be used, or Triton leaves this out.
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") >= number


@triton.jit
def _chunk(program, max_tokens, CHUNK: tl.constexpr):
    """Tokens of a program, int64, and which of them exist."""
    t = program * CHUNK + tl.arange(0, CHUNK)
    return t.to(tl.int64), t < max_tokens


@triton.jit
def _half(peers_ptr, peer, number, half_bytes, dtype: tl.constexpr):
    """Where a rank's half of its buffer for exchange `number` starts: its rows, as a pointer, and its address."""
    address = tl.load(peers_ptr + peer) + (number & 1) * half_bytes
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16), address


@triton.jit
def _copy(to_ptr, from_ptr, to_row, from_row, from_stride, mask, H, BLOCK: tl.constexpr):
    """Rows of `mask`."""
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = mask[:, None] & (h < H)[None, :]
        value = tl.load(from_ptr + from_row[:, None] * from_stride + h[None, :], mask=inside, cache_modifier=".cg")
        tl.store(to_ptr + to_row[:, None] * H + h[None, :], value, mask=inside)


@triton.jit
def _pairs(sums, first, last, UNROLL: tl.constexpr):
    """For UNROLL pairs of slots from `first` on: their rows, -1 from `last` on, and their weights, () for ones."""
    weight_ptr, _, scatter_ptr, pair_ptr = sums
    rows = ()
    weights = ()
    for u in tl.static_range(UNROLL):
        rows = rows + (tl.load(scatter_ptr + first + u, mask=first + u < last, other=-1),)
    if weight_ptr is not None:
        for u in tl.static_range(UNROLL):
            pair = tl.load(pair_ptr + rows[u], mask=rows[u] >= 0, other=0)
            weights = weights + (tl.load(weight_ptr + pair, mask=rows[u] >= 0, other=0),)
    return rows, weights


@triton.jit
def _spans(sums, slot, mask, UNROLL: tl.constexpr):
    """For slots of `mask`, with sums: where their pairs begin and end, and the first UNROLL. All columns share them."""
    if sums[1] is not None:
        first = tl.load(sums[1] + slot, mask=mask, other=0)
        last = tl.load(sums[1] + slot + 1, mask=mask, other=0)
        spans = (first, last, _pairs(sums, first, last, UNROLL))
    else:
        spans = ()
    return spans


@triton.jit
def _add(acc, rows_ptr, pairs, h, H, UNROLL: tl.constexpr):
    """acc plus columns h of the pairs. All loads stand before the first sum, so that ptxas keeps them in flight."""
    rows, weights = pairs
    values = ()
    for u in tl.static_range(UNROLL):
        at = rows[u].to(tl.int64)[:, None] * H + h[None, :]
        values = values + (tl.load(rows_ptr + at, mask=(rows[u] >= 0)[:, None] & (h < H)[None, :], other=0),)
    for u in tl.static_range(UNROLL):
        if len(weights) > 0:
            acc += values[u].to(tl.float32) * weights[u][:, None]
        else:
            acc += values[u].to(tl.float32)
    return acc


@triton.jit
def _share(rows_ptr, sums, spans, slot, mask, h, H, CHOICES: tl.constexpr, UNROLL: tl.constexpr):
    """Sums of this rank's experts for slots of `mask`, columns h: rows of partial, or with sums those of `combine`."""
    if sums[1] is not None:
        first, last, pairs = spans
        acc = _add(tl.zeros((slot.shape[0], h.shape[0]), tl.float32), rows_ptr, pairs, h, H, UNROLL)
        if CHOICES > UNROLL:
            for start in range(UNROLL, tl.max(last - first, 0), UNROLL):
                acc = _add(acc, rows_ptr, _pairs(sums, first + start, last, UNROLL), h, H, UNROLL)
        share = acc.to(rows_ptr.dtype.element_ty)
    else:
        share = tl.load(rows_ptr + slot[:, None] * H + h[None, :], mask=mask[:, None] & (h < H)[None, :], other=0)
    return share


@triton.jit
def _push(
    chunk, peer, x_ptr, x_stride, sums, ids_ptr, values_ptr, peers_ptr, sent_ptr, state_ptr, num_tokens, max_tokens,
    rank, experts, chunks, H, K, half_bytes, ids_at, values_at, flags_at,
    HOME: tl.constexpr, IDS: tl.constexpr, CHUNK: tl.constexpr, CHOICES: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """A chunk for a peer. x, ids, values: (T, …) to the experts; (W·M, …) home, with local ids."""
    t, exists = _chunk(chunk, max_tokens, CHUNK)
    k = tl.arange(0, CHOICES)[None, :]
    if HOME:
        row = peer * max_tokens + t
        ids = tl.load(ids_ptr + row[:, None] * K + k, mask=exists[:, None] & (k < K), other=-1)
        mine = ids >= 0
    else:
        row = t
        ids = tl.load(ids_ptr + row[:, None] * K + k, mask=(t < num_tokens)[:, None] & (k < K), other=-1)
        mine = (ids >= peer * experts) & (ids < (peer + 1) * experts)
        ids = tl.where(mine, ids - peer * experts, -1)
    number = tl.load(sent_ptr + peer * chunks + chunk) + 1
    rows_ptr, address = _half(peers_ptr, peer, number, half_bytes, x_ptr.dtype.element_ty)
    slot = rank * max_tokens + t
    wanted = tl.max(mine.to(tl.int32), 1) > 0
    if HOME:
        broken = tl.load(state_ptr, volatile=True) != 0
        spans = _spans(sums, row, wanted, UNROLL)
        for start in range(0, H, BLOCK):
            h = start + tl.arange(0, BLOCK)
            share = _share(x_ptr, sums, spans, row, wanted, h, H, CHOICES, UNROLL)
            share = tl.where(broken, float("nan"), share)
            tl.store(rows_ptr + slot[:, None] * H + h[None, :], share, mask=wanted[:, None] & (h < H)[None, :])
    else:
        _copy(rows_ptr, x_ptr, slot, row, x_stride, wanted, H, BLOCK)
    if IDS:
        to = (address + ids_at).to(tl.pointer_type(tl.int32))
        tl.store(to + slot[:, None] * K + k, ids, mask=exists[:, None] & (k < K))
    if values_ptr is not None:
        to = (address + values_at).to(tl.pointer_type(tl.float32))
        values = tl.load(values_ptr + row[:, None] * K + k, mask=mine)
        tl.store(to + slot[:, None] * K + k, values, mask=mine)
    if DELAY > 0:  # only in tests: a reader that does not wait for the flag reads too early
        start = tl.extra.cuda.globaltimer()
        while tl.extra.cuda.globaltimer() - start < DELAY:
            pass
    tl.debug_barrier()
    flag = (tl.load(peers_ptr + peer) + flags_at).to(tl.pointer_type(tl.int32)) + rank * chunks + chunk
    tl.atomic_xchg(flag, number, sem="release", scope="sys")
    tl.store(sent_ptr + peer * chunks + chunk, number)


@triton.jit
def _take(
    chunk, source, x_ptr, x_stride, ids_ptr, values_ptr, rows_ptr, local_ids_ptr, local_values_ptr, peers_ptr,
    taken_ptr, state_ptr, num_tokens, max_tokens, rank, experts, chunks, H, K, half_bytes, ids_at, values_at, flags_at,
    IDS: tl.constexpr, WORLD: tl.constexpr, CHUNK: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """A chunk of a source, which may be this rank. Writes rows (W·M, H) of the tokens that have an expert here.

    With IDS also local_ids and local_values (W·M, K); without, local_ids is read.
    """
    t, exists = _chunk(chunk, max_tokens, CHUNK)
    k = tl.arange(0, CHOICES)[None, :]
    row = source * max_tokens + t
    inside = exists[:, None] & (k < K)
    if source == rank:
        ids = tl.load(ids_ptr + t[:, None] * K + k, mask=(t < num_tokens)[:, None] & (k < K), other=-1)
        mine = (ids >= rank * experts) & (ids < (rank + 1) * experts)
        if IDS:
            tl.store(local_ids_ptr + row[:, None] * K + k, tl.where(mine, ids - rank * experts, -1), mask=inside)
            values = tl.load(values_ptr + t[:, None] * K + k, mask=mine, other=0)
            tl.store(local_values_ptr + row[:, None] * K + k, values, mask=inside)
        _copy(rows_ptr, x_ptr, row, t, x_stride, tl.max(mine.to(tl.int32), 1) > 0, H, BLOCK)
    else:
        number = tl.load(taken_ptr + source * chunks + chunk) + 1
        from_ptr, address = _half(peers_ptr, rank, number, half_bytes, x_ptr.dtype.element_ty)
        flag = (tl.load(peers_ptr + rank) + flags_at).to(tl.pointer_type(tl.int32)) + source * chunks + chunk
        came = _wait(flag, number, source, peers_ptr, state_ptr, WORLD, LIMIT)
        if IDS:
            sent = (address + ids_at).to(tl.pointer_type(tl.int32))
            ids = tl.load(sent + row[:, None] * K + k, mask=inside & came, other=-1, cache_modifier=".cg")
            tl.store(local_ids_ptr + row[:, None] * K + k, ids, mask=inside)
            sent = (address + values_at).to(tl.pointer_type(tl.float32))
            values = tl.load(sent + row[:, None] * K + k, mask=inside & (ids >= 0), other=0, cache_modifier=".cg")
            tl.store(local_values_ptr + row[:, None] * K + k, values, mask=inside)
        else:
            ids = tl.load(local_ids_ptr + row[:, None] * K + k, mask=inside & came, other=-1)
        _copy(rows_ptr, from_ptr, row, row, H, tl.max((ids >= 0).to(tl.int32), 1) > 0, H, BLOCK)
        tl.store(taken_ptr + source * chunks + chunk, number)


@triton.jit
def _total(
    chunk, partial_ptr, sums, ids_ptr, values_ptr, y_ptr, y_values_ptr, peers_ptr, taken_ptr, state_ptr,
    num_tokens, max_tokens, rank, experts, chunks, H, K, half_bytes, values_at, flags_at,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, CHOICES: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """A chunk of own tokens. partial (W·M, H), values (W·M, K), ids (T, K) → y (T, H), y_values (T, K)."""
    t, _ = _chunk(chunk, max_tokens, CHUNK)
    k = tl.arange(0, CHOICES)[None, :]
    inside = (t < num_tokens)[:, None] & (k < K)
    ids = tl.load(ids_ptr + t[:, None] * K + k, mask=inside, other=-1)
    owner = tl.where(ids >= 0, ids // experts, WORLD)
    owner = tl.where(owner < WORLD, owner, -1)
    own = rank * max_tokens + t
    here = tl.max((owner == rank).to(tl.int32), 1) > 0
    number = tl.load(taken_ptr + ((rank + 1) % WORLD) * chunks + chunk) + 1
    from_ptr, address = _half(peers_ptr, rank, number, half_bytes, y_ptr.dtype.element_ty)
    flags = (tl.load(peers_ptr + rank) + flags_at).to(tl.pointer_type(tl.int32))
    senders = tl.zeros((CHUNK,), tl.int32)  # bit r: rank r has an expert of the token
    came = tl.load(state_ptr, volatile=True) == 0
    spans = _spans(sums, own, here, UNROLL)
    for source in tl.static_range(WORLD):
        senders += tl.max((owner == source).to(tl.int32), 1) << source
        if source != rank:
            came &= _wait(flags + source * chunks + chunk, number, source, peers_ptr, state_ptr, WORLD, LIMIT)
            tl.store(taken_ptr + source * chunks + chunk, number)
    if values_ptr is not None:
        sent = (address + values_at).to(tl.pointer_type(tl.float32))
        slot = (owner * max_tokens + t[:, None]) * K + k
        values = tl.load(sent + slot, mask=inside & (owner >= 0) & (owner != rank), other=0, cache_modifier=".cg")
        values += tl.load(values_ptr + own[:, None] * K + k, mask=inside & (owner == rank), other=0)
        tl.store(y_values_ptr + t[:, None] * K + k, values, mask=inside)
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        share = _share(partial_ptr, sums, spans, own, here, h, H, CHOICES, UNROLL)
        acc = tl.zeros((CHUNK, BLOCK), tl.float32)
        for source in tl.static_range(WORLD):
            sends = (((senders >> source) & 1) > 0)[:, None] & (h < H)[None, :]
            at = (source * max_tokens + t)[:, None] * H + h[None, :]
            part = tl.load(from_ptr + at, mask=sends & (source != rank), other=0, cache_modifier=".cg")
            acc += tl.where(source == rank, share, part).to(tl.float32)
        acc = tl.where(came, acc, float("nan"))
        tl.store(y_ptr + t[:, None] * H + h[None, :], acc.to(y_ptr.dtype.element_ty),
                 mask=(t < num_tokens)[:, None] & (h < H)[None, :])  # fmt: skip


@quick
@triton.jit(do_not_specialize=["num_tokens", "rank", "experts", "chunks", "lag", "pushes", "reads"])
def to_experts_kernel(
    x_ptr, x_stride, ids_ptr, values_ptr, rows_ptr, local_ids_ptr, local_values_ptr, peers_ptr, sent_ptr, taken_ptr,
    state_ptr, num_tokens, max_tokens, rank, experts, chunks, lag, pushes, reads, H, K, half_bytes, ids_at, values_at,
    flags_at,
    IDS: tl.constexpr, WORLD: tl.constexpr, CHUNK: tl.constexpr, CHOICES: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK: tl.constexpr, LIMIT: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """chunks + lag turns of programs: W - 1 push a chunk, one takes it from x, W - 1 take a chunk of lag turns ago."""
    turn = tl.program_id(0) // (2 * WORLD - 1)
    role = tl.program_id(0) % (2 * WORLD - 1)
    if role < WORLD - 1:
        if pushes & (turn < chunks):
            _push(
                turn, (rank + 1 + role) % WORLD, x_ptr, x_stride, (None, None, None, None), ids_ptr, values_ptr,
                peers_ptr, sent_ptr, state_ptr, num_tokens, max_tokens, rank, experts, chunks, H, K, half_bytes, ids_at,
                values_at, flags_at, False, IDS, CHUNK, CHOICES, UNROLL, BLOCK, DELAY,
            )  # fmt: skip
    else:
        chunk = turn - tl.where(role < WORLD, 0, lag)
        if reads & (chunk >= 0) & (chunk < chunks):
            _take(
                chunk, (rank + 1 + role) % WORLD, x_ptr, x_stride, ids_ptr, values_ptr, rows_ptr, local_ids_ptr,
                local_values_ptr, peers_ptr, taken_ptr, state_ptr, num_tokens, max_tokens, rank, experts, chunks, H, K,
                half_bytes, ids_at, values_at, flags_at, IDS, WORLD, CHUNK, CHOICES, BLOCK, LIMIT,
            )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["num_tokens", "rank", "experts", "chunks", "lag", "pushes", "reads"])
def to_home_kernel(
    partial_ptr, weight_ptr, token_offsets_ptr, scatter_ptr, pair_ptr, local_ids_ptr, values_ptr, ids_ptr, y_ptr,
    y_values_ptr, peers_ptr, sent_ptr, taken_ptr, state_ptr, num_tokens, max_tokens, rank, experts, chunks, lag, pushes,
    reads, H, K, half_bytes, ids_at, values_at, flags_at,
    WORLD: tl.constexpr, CHUNK: tl.constexpr, CHOICES: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """chunks + lag turns of programs: W - 1 push a chunk, one gives the totals of the chunk of lag turns ago.

    partial (W·M, H); with the indices of a Dispatch rows (R, H) by expert, and weight (W·M·K,) or None for ones.
    """
    turn = tl.program_id(0) // WORLD
    role = tl.program_id(0) % WORLD
    sums = (weight_ptr, token_offsets_ptr, scatter_ptr, pair_ptr)
    if role < WORLD - 1:
        if pushes & (turn < chunks):
            _push(
                turn, (rank + 1 + role) % WORLD, partial_ptr, H, sums, local_ids_ptr, values_ptr, peers_ptr, sent_ptr,
                state_ptr, num_tokens, max_tokens, rank, experts, chunks, H, K, half_bytes, ids_at, values_at, flags_at,
                True, False, CHUNK, CHOICES, UNROLL, BLOCK, DELAY,
            )  # fmt: skip
    elif reads & (turn >= lag):
        _total(
            turn - lag, partial_ptr, sums, ids_ptr, values_ptr, y_ptr, y_values_ptr, peers_ptr, taken_ptr, state_ptr,
            num_tokens, max_tokens, rank, experts, chunks, H, K, half_bytes, values_at, flags_at, WORLD, CHUNK, CHOICES,
            UNROLL, BLOCK, LIMIT,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["experts", "num_rows", "num_pairs"])
def limit_kernel(
    offsets_ptr, scatter_ptr, new_offsets_ptr, new_scatter_ptr, peers_ptr, state_ptr, experts, num_rows, num_pairs,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """offsets (E'+1,) and scatter (R,) with no row from num_rows on. Where there was one, report a fault, W + 1."""
    e = tl.arange(0, EXPERTS)
    offsets = tl.load(offsets_ptr + e, mask=e <= experts, other=0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(scatter_ptr + at, mask=at < num_pairs, other=0)
    tl.store(new_scatter_ptr + at, tl.minimum(row, num_rows - 1), mask=at < num_pairs)
    if tl.program_id(0) == 0:
        tl.store(new_offsets_ptr + e, tl.minimum(offsets, num_rows), mask=e <= experts)
        arrived = tl.max(offsets, 0)
        if arrived > num_rows:
            tl.store(state_ptr, WORLD + 1)
            alarm = tl.load(peers_ptr + WORLD).to(tl.pointer_type(tl.int32))
            tl.store(alarm + 1, arrived)
            tl.store(alarm, WORLD + 1)
