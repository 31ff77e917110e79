"""Tokenize documents in several processes.

Batches of documents keep the order of the source, and each document is tokenized alone. So the result does not depend
on the number of processes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from megablocks.data.indexed import DataError, token_dtype
from megablocks.data.sources import Source, is_text
from megablocks.data.tokenizers import TokenizerSpec, load_tokenizer

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 256

Raw = tuple[int, str, bytes]  # index of the source, key, contents


@dataclass(frozen=True)
class Encoded:
    """One document: its tokens and the end-of-document id, or None if it is empty or not text."""

    key: str
    digest: bytes
    tokens: np.ndarray | None


def _make_encoder(folder: Path, spec: TokenizerSpec, sources: list[Source]) -> Callable[[list[Raw]], list[Encoded]]:
    """Return the function that a worker calls with a batch of documents. Their sources decode them."""
    ids_of, dtype = load_tokenizer(folder, spec), token_dtype(spec.vocab_size)

    def encode(source: int, key: str, raw: bytes) -> Encoded:
        text = sources[source].text(key, raw) if is_text(raw) else ""
        ids = ids_of(text) if text else []
        if ids and (largest := max(ids)) >= spec.vocab_size:
            allowed = f"must be below {spec.vocab_size}, the number of its tokens"
            raise DataError(f"{key}: the tokenizer returned the id {largest}, {allowed}")
        tokens = np.asarray([*ids, spec.eod], dtype=dtype) if ids else None
        return Encoded(key, hashlib.sha256(raw).digest(), tokens)

    return lambda batch: [encode(*raw) for raw in batch]


_encoder: Callable[[list[Raw]], list[Encoded]] | None = None


def _start_worker(folder: Path, spec: TokenizerSpec, sources: list[Source]) -> None:
    """Start a process of the pool: create its encoder, and let it end together with its parent."""
    global _encoder
    _encoder = _make_encoder(folder, spec, sources)
    # Each worker also holds the writing end of the pipe that it reads. So it would wait forever for a killed parent.
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: list[Raw]) -> list[Encoded]:
    assert _encoder is not None, "the pool's initializer ran"
    return _encoder(batch)


def _batches(raws: Iterable[Raw]) -> Iterator[list[Raw]]:
    """Yield batches of documents with a limited number and size. A worker gets one batch at a time."""
    batch: list[Raw] = []
    size = 0
    for raw in raws:
        batch.append(raw)
        size += len(raw[2])
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    raws: Iterable[Raw], folder: Path, spec: TokenizerSpec, sources: list[Source], workers: int
) -> Iterator[Encoded]:
    """Yield every document, tokenized, in order. `workers` = 1 uses this process, a larger number starts a pool."""
    if workers == 1:
        encode = _make_encoder(folder, spec, sources)
        for batch in _batches(raws):
            yield from encode(batch)
        return
    # spawn: a forked child would inherit locked locks from the threads of the tokenizer and of the progress bar.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (folder, spec, sources)) as pool:
        pending: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in _batches(raws):
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) >= 3 * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise DataError(f"{folder}: a worker died, probably because memory ran out: use fewer --workers") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def unigram_statistics(train: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """Compute entropies in nats per token from token counts (V,).

    `valid_entropy`: unigram entropy of the validation tokens, the lowest loss that a model without context can reach.
    `valid_cross_entropy`: loss of the training tokens' unigram model, with add-one smoothing, on the validation tokens.
    """
    p = valid[valid > 0] / valid.sum()
    smoothed = np.log((train + 1) / (train.sum() + train.size))
    return {
        "valid_entropy": round(float(-(p * np.log(p)).sum()), 9),
        "valid_cross_entropy": round(float(-(valid @ smoothed) / valid.sum()), 9),
    }
