"""The command line of `scripts/prepare_data.py`, which makes a data folder from text.

The folder appears complete or not at all: it is built in a hidden folder next to it (`.<name>.partial`), with the
manifest last, and then renamed. The same inputs, options and package versions produce the same bytes.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megablocks import __version__
from megablocks.config import ConfigError, is_dry_run, refuse
from megablocks.data import tokenizers
from megablocks.data.indexed import DataError, IndexedWriter, token_dtype
from megablocks.data.manifest import NAME as MANIFEST
from megablocks.data.manifest import read_manifest, write_manifest
from megablocks.data.pipeline import Raw, encode_all, unigram_statistics
from megablocks.data.sources import JSONL, STDLIB, Entry, Source, choose, held_out, is_text, matches, open_source, rank
from megablocks.data.tokenizers import TokenizerSpec
from megablocks.data.verify import verify_folder
from megablocks.files import exclusive, hash_files, sync

# Enough text to train a vocabulary of 50k, which takes seconds.
_SAMPLE_BYTES = 32 << 20
# Options that determine the tokens; the manifest stores them.
_RECIPE = "include exclude max_document_bytes max_documents max_bytes valid_fraction tokenizer vocab_size".split()


def parser() -> argparse.ArgumentParser:
    """The options of a preparation. `main` handles `verify DIR` before them."""
    p = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Make Megatron's .bin/.idx files from text. `prepare_data.py verify DIR` checks such a folder.",
        epilog="DRY_RUN=1 prints what would be done.",
        allow_abbrev=False,
    )
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument(
        "--input",
        nargs="+",
        default=[STDLIB],
        help="folders (each file is a document), text files, .jsonl files (each line is a document), tar archives "
        "(.tar, .tar.xz, ...), or the word stdlib: the standard library of the running Python (default)",
    )
    p.add_argument("--jsonl-field", default="text", help="field of a .jsonl line that holds the text (default: text)")
    p.add_argument("--include", nargs="+", help="keep only documents that match a pattern (default for stdlib: *.py)")
    p.add_argument("--exclude", nargs="+", default=[], help="leave out documents that match a pattern")
    p.add_argument("--max-document-bytes", type=int, help="leave out longer documents, which are mostly tables")
    p.add_argument(
        "--max-documents", type=int, help="keep at most this many documents, chosen by the hash of their names"
    )
    p.add_argument("--max-bytes", type=int, help="keep at most this many bytes in all, chosen in the same way")
    p.add_argument(
        "--valid-fraction", type=float, default=0.05, help="fraction of documents to hold out (default: 0.05)"
    )
    p.add_argument("--tokenizer", choices=("sentencepiece", "hf", "gpt2"), default="sentencepiece")
    p.add_argument("--tokenizer-model", help="a SentencePiece model, or the folder or name of a Hugging Face tokenizer")
    p.add_argument("--trust-remote-code", action="store_true", help="allow the Python code of a Hugging Face tokenizer")
    p.add_argument("--vocab-size", type=int, help="size of the SentencePiece vocabulary to train (default: 8192)")
    p.add_argument("--vocab-file", help="vocab.json, for --tokenizer=gpt2")
    p.add_argument("--merges-file", help="merges.txt, for --tokenizer=gpt2")
    p.add_argument("--workers", type=int, help="processes (default: all cores); the result does not depend on them")
    p.add_argument("--overwrite", action="store_true", help="replace the data set if it exists")
    return p


def check_options(args: argparse.Namespace) -> None:
    """Set defaults. Bad values and combinations raise a ConfigError of one line."""
    for option in ("max_document_bytes", "max_documents", "max_bytes", "workers"):
        value = getattr(args, option)
        if value is not None and value < 1:
            refuse("--" + option.replace("_", "-"), value, "must be at least 1")
    if not 0 < args.valid_fraction < 1:
        refuse("--valid-fraction", args.valid_fraction, "must be between 0 and 1")
    if args.tokenizer == "sentencepiece" and args.tokenizer_model is None:
        args.vocab_size = 8192 if args.vocab_size is None else args.vocab_size
        if args.vocab_size < tokenizers.MIN_VOCAB_SIZE:
            refuse("--vocab-size", args.vocab_size, f"must be at least {tokenizers.MIN_VOCAB_SIZE}")
        if args.vocab_size > 2**31 - 1:
            refuse("--vocab-size", args.vocab_size, "must be less than 2**31, as SentencePiece counts")
    elif args.vocab_size is not None:
        refuse("--vocab-size", args.vocab_size, "is only for a SentencePiece model that is trained here")
    if args.tokenizer == "hf" and args.tokenizer_model is None:
        refuse("--tokenizer-model", None, "--tokenizer=hf needs the folder or name of a Hugging Face tokenizer")
    if args.tokenizer == "gpt2" and args.tokenizer_model is not None:
        refuse("--tokenizer-model", args.tokenizer_model, "--tokenizer=gpt2 takes --vocab-file and --merges-file")
    files = {"--vocab-file": args.vocab_file, "--merges-file": args.merges_file}
    for option, value in files.items():
        if args.tokenizer != "gpt2" and value is not None:
            refuse(option, value, "is only for --tokenizer=gpt2")
    needed = files if args.tokenizer == "gpt2" else {}
    if args.tokenizer == "sentencepiece" and args.tokenizer_model is not None:
        needed = {"--tokenizer-model": args.tokenizer_model}
    for option, value in needed.items():
        if value is None or not Path(value).is_file():
            refuse(option, value, "must be a file")
    if args.include is None:
        args.include = ["*.py"] if args.input == [STDLIB] else []
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for flag, paths in (("--out", [args.out]), ("--input", args.input)):
        if "" in paths:  # for example from an unset variable
            refuse(flag, "", "must be a path; . is the current folder")
    args.out = Path(os.path.realpath(args.out))  # a rename would replace a link
    try:
        str(args.out).encode()
    except UnicodeEncodeError:
        refuse("--out", str(args.out), "must be a UTF-8 path, because the tokenizers' libraries accept no other")
    is_data_set = (args.out / MANIFEST).is_file()
    if is_data_set and not args.overwrite:
        refuse("--out", str(args.out), "exists; check it with `prepare_data.py verify`, or replace it with --overwrite")
    if not is_data_set and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        refuse("--out", str(args.out), "exists and is no data set; choose another folder or remove it")
    if os.path.ismount(args.out):
        refuse("--out", str(args.out), "is a mount point, which cannot be renamed; give a folder in it")
    if is_data_set:
        _refuse_other_files(args.out)


def _refuse_other_files(out: Path) -> None:
    """Raise ConfigError for a folder to replace that is not a data set, or also contains the user's files."""
    try:
        known = {MANIFEST, *read_manifest(out).files}
    except DataError as error:
        refuse("--out", str(out), f"is no data set ({error}); choose another folder or remove it")
    for path in sorted(out.rglob("*")):
        if path.is_dir() or path.parent.name == "GPTDataset_indices":  # Megatron's, from runs without a run folder
            continue
        if (name := path.relative_to(out).as_posix()) not in known:
            refuse("--out", str(out), f"holds {name}, which is not of the data set; move it, or choose another folder")


@dataclass(frozen=True)
class Plan:
    """The documents to read: `wanted[i]` holds the keys of source i, `valid` the keys to hold out."""

    sources: list[Source]
    entries: list[Entry]
    wanted: list[set[str]]
    valid: set[str]

    def read(self, keys: set[str] | None = None) -> Iterator[Raw]:
        """Yield raw documents in order: those in `keys`, or all."""
        for number, source in enumerate(self.sources):
            wanted = self.wanted[number] if keys is None else self.wanted[number] & keys
            if wanted:
                for key, raw in source.read(wanted):
                    yield number, key, raw


def make_plan(args: argparse.Namespace) -> Plan:
    """List every source, choose documents by their keys and sizes, and split them."""
    sources = [open_source(text, args.jsonl_field) for text in args.input]
    owner: dict[str, int] = {}
    entries: list[Entry] = []
    for number, source in enumerate(sources):
        for entry in source.entries():
            if not entry.size or not matches(entry.key, args.include, args.exclude):
                continue
            if args.max_document_bytes is not None and entry.size > args.max_document_bytes:
                continue
            if not args.include and entry.key.endswith(JSONL):
                fix = "give such files themselves, or leave them out by --exclude; with --include they are plain text"
                refuse("--input", args.input[number], f"holds {entry.key}, whose lines would be one document; {fix}")
            if entry.key in owner:
                fix = "rename one, or give one folder with both below it"
                refuse("--input", args.input, f"the document {entry.key!r} occurs twice; {fix}")
            owner[entry.key] = number
            entries.append(entry)
    chosen = choose(entries, args.max_documents, args.max_bytes)
    if len(chosen) < 2:
        found = f"{len(chosen)} of {len(entries)} non-empty documents chosen"
        refuse("--input", args.input, f"{found}, must be at least 2: one to train on and one to hold out")
    wanted: list[set[str]] = [set() for _ in sources]
    for entry in chosen:
        wanted[owner[entry.key]].add(entry.key)
    return Plan(sources, chosen, wanted, held_out(chosen, args.valid_fraction))


def _make_tokenizer(args: argparse.Namespace, plan: Plan, folder: Path) -> TokenizerSpec:
    """Copy the tokenizer that args name into the folder, or train one on a sample of the training documents."""
    if args.tokenizer == "gpt2":
        return tokenizers.build_gpt2(folder, Path(args.vocab_file), Path(args.merges_file))
    if args.tokenizer == "hf":
        return tokenizers.save_hugging_face(folder, args.tokenizer_model, args.trust_remote_code)
    if args.tokenizer_model is not None:
        return tokenizers.copy_sentencepiece(folder, Path(args.tokenizer_model))
    keys: set[str] = set()
    size = 0
    for entry in sorted(plan.entries, key=lambda entry: (rank(entry.key, "sample"), entry.key)):
        if entry.key not in plan.valid and (not keys or size + entry.size <= _SAMPLE_BYTES):
            keys.add(entry.key)
            size += entry.size
    texts = (plan.sources[number].text(key, raw) for number, key, raw in plan.read(keys) if is_text(raw))
    return tokenizers.train_sentencepiece(folder, texts, args.vocab_size)


def _package_versions(args: argparse.Namespace) -> dict[str, str]:
    """Return, for the manifest, the versions of the packages that a data set's bytes depend on."""
    names = ["numpy", *(["sentencepiece"] if args.tokenizer == "sentencepiece" else ["tokenizers", "transformers"])]
    return {
        "megablocks": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def build(args: argparse.Namespace, plan: Plan, folder: Path) -> dict[str, Any]:
    """Write all files of a data set into `folder`, the manifest last. Returns the content of the manifest."""
    _say(f"{len(plan.entries):,} documents, {sum(e.size for e in plan.entries):,} bytes; making the tokenizer")
    spec = _make_tokenizer(args, plan, folder)
    dtype = token_dtype(spec.vocab_size)
    writers = {split: IndexedWriter(folder / split, dtype) for split in ("train", "valid")}
    occurrences = {split: np.zeros(spec.vocab_size, dtype=np.int64) for split in writers}
    digest, skipped = hashlib.sha256(), 0
    with _progress(sum(entry.size for entry in plan.entries)) as bar:
        sizes = {entry.key: entry.size for entry in plan.entries}
        for document in encode_all(plan.read(), folder, spec, plan.sources, args.workers):
            digest.update(document.key.encode("utf-8", "surrogateescape") + b"\0" + document.digest)
            if document.tokens is None:
                skipped += 1
            else:
                split = "valid" if document.key in plan.valid else "train"
                writers[split].add(document.tokens)
                occurrences[split] += np.bincount(document.tokens, minlength=spec.vocab_size)
            bar.update(sizes[document.key])
    for writer in writers.values():
        writer.close()
    splits = {name: {"documents": len(w.lengths), "tokens": sum(w.lengths)} for name, w in writers.items()}
    for name, counts in splits.items():
        if not counts["tokens"]:
            raise DataError(f"{name}.bin: no tokens: all documents of this split are empty or no text")
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    content: dict[str, Any] = {
        "splits": splits,
        "dtype": dtype.name,
        "vocab_size": spec.vocab_size,
        "eod": spec.eod,
        "tokenizer": {"type": spec.type, "path": spec.path, **({"runs_code": True} if spec.runs_code else {})},
        "unigram": unigram_statistics(occurrences["train"], occurrences["valid"]),
        "source": {
            "inputs": [source.name for source in plan.sources],
            "documents": len(plan.entries),
            "bytes": sum(entry.size for entry in plan.entries),
            "skipped": skipped,
            "sha256": digest.hexdigest(),
        },
        "recipe": {name: getattr(args, name) for name in _RECIPE},
        "versions": _package_versions(args),
        "files": hash_files(folder, sorted(files)),
    }
    content["fingerprint"] = write_manifest(folder, content)
    return content


def prepare(args: argparse.Namespace) -> None:
    """Plan the data set, build it in the hidden folder, and rename that."""
    check_options(args)
    started, dry_run = time.monotonic(), is_dry_run()
    plan = make_plan(args)
    if dry_run:
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
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out={str(args.out)!r}: cannot be made ({error.strerror}); choose another folder"
        ) from None
    with exclusive(partial, DataError(f"{partial}: another process prepares the same folder: wait until it ends")):
        for leftover in partial.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            content = build(args, plan, partial)
            _put_in_place(partial, args.out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
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
    """Rename the finished folder to `out`. An older data set is renamed first, and removed last."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(partial, out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _progress(total: int) -> Any:
    """Return a tqdm bar for `total` bytes, as a context manager. It shows nothing without a terminal or tqdm."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return nullcontext(SimpleNamespace(update=lambda size: None))
    return tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None)  # None: without a terminal


def _say(line: str) -> None:
    print(f"prepare_data: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 done, 2 a user's error (one line on stderr), 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["verify"]:
            verifier = argparse.ArgumentParser(prog="prepare_data.py verify", description="Check a prepared folder.")
            verifier.add_argument("folder")
            folder = verifier.parse_args(arguments[1:]).folder
            _, lines = verify_folder(folder, trust_remote_code=True)  # this loads no tokenizer
            for line in lines:
                _say(f"ok  {line}")
            _say(f"{folder} is complete")
        else:
            prepare(parser().parse_args(arguments))
    except (ConfigError, DataError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fix = "; make room or choose another --out" if error.errno == errno.ENOSPC else ""
        print(f"prepare_data: error: {where}{error.strerror or error}{fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data: interrupted, no files are left behind", file=sys.stderr)
        return 130
    return 0
