"""The command line of `scripts/prepare_data.py`: text in, a verified data folder out.

The folder appears whole or not at all: work happens in a hidden sibling (`.<name>.partial`), the manifest is written
last, and a rename ends it. The same inputs, options and package versions give the same bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megablocks import __version__
from megablocks.config import ConfigError
from megablocks.data import tokenizers
from megablocks.data.indexed import DataError, sha256_of, token_dtype
from megablocks.data.manifest import sync_folder, write_manifest
from megablocks.data.pipeline import Raw, SplitWriter, encode_all, unigram_statistics
from megablocks.data.sources import STDLIB, Entry, Source, choose, held_out, matches, open_source, rank
from megablocks.data.tokenizers import TokenizerSpec
from megablocks.data.verify import verify_folder

# Enough text for a vocabulary of 50k, and small enough to train on in seconds.
_SAMPLE_BYTES = 32 << 20
# Options that decide the tokens, kept in the manifest.
_RECIPE = (
    "include",
    "exclude",
    "max_document_bytes",
    "max_documents",
    "max_bytes",
    "valid_fraction",
    "tokenizer",
    "vocab_size",
)


def parser() -> argparse.ArgumentParser:
    """The options of a preparation; `verify DIR` is handled before them."""
    p = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Text to Megatron's .bin/.idx with a manifest. `prepare_data.py verify DIR` checks a folder.",
        epilog="DRY_RUN=1 prints what would be done.",
        allow_abbrev=False,
    )
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument(
        "--input",
        nargs="+",
        default=[STDLIB],
        help="folders (a document a file), text files, .jsonl files (a document a line), tar archives (.tar, .tar.xz, "
        "...), or the word stdlib: the running Python's standard library (default)",
    )
    p.add_argument("--jsonl-field", default="text", help="field of a .jsonl line that holds the text (text)")
    p.add_argument("--include", nargs="+", help="keep documents that match one of these patterns (stdlib: *.py)")
    p.add_argument("--exclude", nargs="+", default=[], help="leave out documents that match one of these patterns")
    p.add_argument("--max-document-bytes", type=int, help="leave out longer documents, which are mostly tables")
    p.add_argument("--max-documents", type=int, help="keep this many, chosen by the hash of their names")
    p.add_argument("--max-bytes", type=int, help="keep documents of this many bytes in all, chosen likewise")
    p.add_argument("--valid-fraction", type=float, default=0.05, help="share of documents held out (0.05)")
    p.add_argument("--tokenizer", choices=("sentencepiece", "hf", "gpt2"), default="sentencepiece")
    p.add_argument("--tokenizer-model", help="a SentencePiece model, or a Hugging Face folder or name")
    p.add_argument("--vocab-size", type=int, help="size of the SentencePiece vocabulary to train (8192)")
    p.add_argument("--vocab-file", help="gpt2: vocab.json")
    p.add_argument("--merges-file", help="gpt2: merges.txt")
    p.add_argument("--workers", type=int, help="processes (all cores); the result does not depend on it")
    p.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    return p


def check_options(args: argparse.Namespace) -> None:
    """Fill defaults and refuse bad values and combinations, one line each."""

    def refuse(option: str, value: object, allowed: str) -> None:
        raise ConfigError(f"--{option}={value!r}: {allowed}")

    for option in ("max_document_bytes", "max_documents", "max_bytes", "workers"):
        value = getattr(args, option)
        if value is not None and value < 1:
            refuse(option.replace("_", "-"), value, "must be at least 1")
    if not 0 < args.valid_fraction < 1:
        refuse("valid-fraction", args.valid_fraction, "must lie between 0 and 1")
    trains = args.tokenizer == "sentencepiece" and args.tokenizer_model is None
    if args.vocab_size is not None and not trains:
        refuse("vocab-size", args.vocab_size, "only for a SentencePiece model trained here")
    if trains:
        args.vocab_size = 8192 if args.vocab_size is None else args.vocab_size
        if args.vocab_size < tokenizers.MIN_VOCAB_SIZE:
            refuse("vocab-size", args.vocab_size, f"must be at least {tokenizers.MIN_VOCAB_SIZE}")
    if args.tokenizer == "hf" and args.tokenizer_model is None:
        refuse("tokenizer-model", None, "a Hugging Face folder or name is required with --tokenizer=hf")
    files = {"vocab-file": args.vocab_file, "merges-file": args.merges_file}
    if args.tokenizer == "sentencepiece" and args.tokenizer_model is not None:
        files["tokenizer-model"] = args.tokenizer_model
    for option, value in files.items():
        if args.tokenizer == "gpt2" or option == "tokenizer-model":
            if value is None or not Path(value).is_file():
                refuse(option, value, "must be a file")
        elif value is not None:
            refuse(option, value, "only with --tokenizer=gpt2")
    if args.tokenizer == "gpt2" and args.tokenizer_model is not None:
        refuse("tokenizer-model", args.tokenizer_model, "gpt2 takes --vocab-file and --merges-file")
    if args.include is None and args.input == [STDLIB]:
        args.include = ["*.py"]
    args.include = args.include or []
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    args.out = Path(os.path.abspath(args.out))
    if args.out.exists() and not args.overwrite and not (args.out.is_dir() and not any(args.out.iterdir())):
        refuse("out", str(args.out), "exists; check it with `prepare_data.py verify`, or replace it with --overwrite")


@dataclass(frozen=True)
class Plan:
    """The documents that will be read: `wanted[i]` are the keys of source i, `valid` those held out."""

    sources: list[Source]
    entries: list[Entry]
    wanted: list[set[str]]
    valid: set[str]

    def read(self, keys: set[str] | None = None) -> Iterator[Raw]:
        """Raw documents in order, of all keys or of those given."""
        for number, source in enumerate(self.sources):
            wanted = self.wanted[number] if keys is None else self.wanted[number] & keys
            if wanted:
                for key, raw in source.read(wanted):
                    yield number, key, raw


def make_plan(args: argparse.Namespace) -> Plan:
    """List every source and decide which documents go where, by their names alone."""
    sources = [open_source(text, args.jsonl_field) for text in args.input]
    owner: dict[str, int] = {}
    entries: list[Entry] = []
    for number, source in enumerate(sources):
        for entry in source.entries():
            if not entry.size or not matches(entry.key, args.include, args.exclude):
                continue
            if args.max_document_bytes is not None and entry.size > args.max_document_bytes:
                continue
            if entry.key in owner:
                raise ConfigError(f"--input={args.input!r}: the document {entry.key!r} occurs twice")
            owner[entry.key] = number
            entries.append(entry)
    chosen = choose(entries, args.max_documents, args.max_bytes)
    if len(chosen) < 2:
        raise ConfigError(
            f"--input={args.input!r}: {len(chosen)} non-empty documents chosen of {len(entries)}; "
            "at least 2 are needed, one of them to hold out"
        )
    wanted: list[set[str]] = [set() for _ in sources]
    for entry in chosen:
        wanted[owner[entry.key]].add(entry.key)
    return Plan(sources, chosen, wanted, held_out(chosen, args.valid_fraction))


def _make_tokenizer(args: argparse.Namespace, plan: Plan, folder: Path) -> TokenizerSpec:
    if args.tokenizer == "gpt2":
        return tokenizers.build_gpt2(folder, Path(args.vocab_file), Path(args.merges_file))
    if args.tokenizer == "hf":
        return tokenizers.save_hugging_face(folder, args.tokenizer_model)
    if args.tokenizer_model is not None:
        return tokenizers.copy_sentencepiece(folder, Path(args.tokenizer_model))
    keys: set[str] = set()
    size = 0
    for entry in sorted(plan.entries, key=lambda entry: (rank(entry.key, "sample"), entry.key)):
        if entry.key not in plan.valid and (not keys or size + entry.size <= _SAMPLE_BYTES):
            keys.add(entry.key)
            size += entry.size
    texts = (plan.sources[number].text(key, raw) for number, key, raw in plan.read(keys))
    return tokenizers.train_sentencepiece(folder, texts, args.vocab_size)


def _package_versions(args: argparse.Namespace) -> dict[str, str]:
    names = ["numpy", *(["sentencepiece"] if args.tokenizer == "sentencepiece" else ["tokenizers", "transformers"])]
    return {
        "megablocks": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def build(args: argparse.Namespace, plan: Plan, folder: Path) -> dict[str, Any]:
    """Fill `folder`, the manifest last; returns the manifest's content."""
    _say(f"{len(plan.entries):,} documents, {sum(e.size for e in plan.entries):,} bytes; making the tokenizer")
    spec = _make_tokenizer(args, plan, folder)
    writers = {name: SplitWriter(folder, name, spec.vocab_size) for name in ("train", "valid")}
    digest, skipped = hashlib.sha256(), 0
    with _progress(sum(entry.size for entry in plan.entries)) as advance:
        sizes = {entry.key: entry.size for entry in plan.entries}
        for document in encode_all(plan.read(), folder, spec, plan.sources, args.workers):
            digest.update(document.key.encode("utf-8", "surrogateescape") + b"\0" + document.digest)
            if document.tokens is None:
                skipped += 1
            else:
                writers["valid" if document.key in plan.valid else "train"].add(document.tokens)
            advance(sizes[document.key])
    splits = {name: writer.close() for name, writer in writers.items()}
    for name, counts in splits.items():
        if not counts["tokens"]:
            raise DataError(f"{name}.bin: no tokens: the documents of this split are all empty or no text")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content: dict[str, Any] = {
        "splits": splits,
        "dtype": token_dtype(spec.vocab_size).name,
        "vocab_size": spec.vocab_size,
        "eod": spec.eod,
        "tokenizer": {"type": spec.type, "path": spec.path},
        "unigram": unigram_statistics(writers["train"].histogram, writers["valid"].histogram),
        "source": {
            "inputs": [source.name for source in plan.sources],
            "documents": len(plan.entries),
            "bytes": sum(entry.size for entry in plan.entries),
            "skipped": skipped,
            "sha256": digest.hexdigest(),
        },
        "recipe": {name: getattr(args, name) for name in _RECIPE},
        "versions": _package_versions(args),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        },
    }
    content["fingerprint"] = write_manifest(folder, content)
    return content


def prepare(args: argparse.Namespace) -> None:
    """Plan, build in the hidden sibling, and put the result in place."""
    check_options(args)
    started = time.monotonic()
    plan = make_plan(args)
    if os.environ.get("DRY_RUN") == "1":
        size = sum(entry.size for entry in plan.entries)
        given = args.tokenizer_model or args.vocab_file
        made = f"trained here with {args.vocab_size} ids" if args.vocab_size else given
        _say(
            f"would make {args.out} from {', '.join(source.name for source in plan.sources)}: "
            f"{len(plan.entries):,} documents, {size:,} bytes, {len(plan.valid):,} held out, "
            f"tokenizer {args.tokenizer} ({made}), {args.workers} workers"
        )
        return
    partial = args.out.with_name(f".{args.out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{partial}: another preparation of the same folder is at work") from None
        for leftover in partial.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            content = build(args, plan, partial)
            _put_in_place(partial, args.out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)
    seconds = time.monotonic() - started
    for name, counts in content["splits"].items():
        _say(f"{name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    _say(
        f"vocabulary {content['vocab_size']:,} ({content['tokenizer']['type']}); unigram entropy of the validation "
        f"tokens {content['unigram']['valid_entropy']:.4f} nats; {content['source']['skipped']} documents skipped; "
        f"{seconds:.1f} s"
    )
    _say(f"made {args.out}, fingerprint {content['fingerprint'][:16]}")


def _put_in_place(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(partial, out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


class _progress:
    """A tqdm bar on a terminal, nothing elsewhere or without tqdm."""

    def __init__(self, total: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                return
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenising")

    def __enter__(self) -> Callable[[int], object]:
        return self._bar.update if self._bar is not None else lambda size: None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _say(line: str) -> None:
    print(f"prepare_data: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a user's error (one line on stderr), 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["verify"]:
            verifier = argparse.ArgumentParser(prog="prepare_data.py verify", description="Check a prepared folder.")
            verifier.add_argument("folder")
            folder = verifier.parse_args(arguments[1:]).folder
            _, lines = verify_folder(folder)
            for line in lines:
                _say(f"ok  {line}")
            _say(f"{folder} is whole")
        else:
            prepare(parser().parse_args(arguments))
    except (ConfigError, DataError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"prepare_data: error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data: interrupted, nothing was left behind", file=sys.stderr)
        return 130
    return 0
