"""Tokenizers for data preparation. A tokenizer is first saved in the data folder; every worker loads it from there.

Megatron loads the same files at training (`--tokenizer-type`, `--tokenizer-model`), so preparation and training always
use the same tokenizer.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megablocks.config import ConfigError

NEEDS_TRUST = "the tokenizer brings its own Python code: read the code, then allow it with --trust-remote-code"
SENTENCEPIECE = "SentencePieceTokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
_SPM_FILE = "tokenizer.model"
_HF_FOLDER = "tokenizer"
# The first ids of a vocabulary that is trained here; 256 byte pieces follow.
_UNK, _EOD = 0, 1
MIN_VOCAB_SIZE = 2 + 256 + 1 + 128
_LONGEST_LINE = 1 << 14


@dataclass(frozen=True)
class TokenizerSpec:
    """The tokenizer of a data folder: Megatron's type, path inside the folder, ids in [0, vocab_size), eod id.

    runs_code: a Hugging Face tokenizer with Python code of its own, which runs when the tokenizer is loaded.
    """

    type: str
    path: str
    vocab_size: int
    eod: int
    runs_code: bool = False


def load_tokenizer(folder: Path, spec: TokenizerSpec) -> Callable[[str], list[int]]:
    """Return the function from a text to its ids, without begin, end or padding tokens."""
    if spec.type == SENTENCEPIECE:
        return _need("sentencepiece").SentencePieceProcessor(model_file=str(folder / spec.path)).encode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = _load_hf(str(folder / spec.path), spec.runs_code)
    tokenizer.model_max_length = 1 << 60  # no warning for documents longer than a model's window
    return partial(tokenizer.encode, add_special_tokens=False)


def train_sentencepiece(folder: Path, texts: Iterable[str], vocab_size: int) -> TokenizerSpec:
    """Train a lossless byte-pair SentencePiece model of `vocab_size` ids on `texts`.

    Every string without U+2581 (SentencePiece's sign for a space) decodes to itself: whitespace is kept, runs of spaces
    can be pieces, newline is a piece, and characters outside the vocabulary become bytes. Byte-pair merging counts
    integers, so the model does not depend on the machine or its number of threads.
    """
    spm = _need("sentencepiece")
    model = io.BytesIO()
    # A list, because SentencePiece would replace an error from a generator by its own error.
    sample = list(texts)
    lines = (line for text in sample for line in text.split("\n") if line and not line.isspace())
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=_LONGEST_LINE,
            user_defined_symbols=["\n"],
            unk_id=_UNK,
            eos_id=_EOD,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].rpartition("] ")[2]
        most = re.search(r"a value <= (\d+)", reason)
        if most is not None and int(most[1]) < MIN_VOCAB_SIZE:  # we would refuse the size that it suggests
            reason = f"too little text for the minimum of {MIN_VOCAB_SIZE} pieces; give more, or --tokenizer-model"
        if "sentences_.empty()" in reason:
            reason = f"it needs lines of 1 to {_LONGEST_LINE} bytes; split the lines, or give --tokenizer-model"
        raise ConfigError(f"--vocab-size={vocab_size}: SentencePiece cannot train it on this text: {reason}") from None
    (folder / _SPM_FILE).write_bytes(model.getvalue())
    return _sentencepiece_spec(folder)


def copy_sentencepiece(folder: Path, model: Path) -> TokenizerSpec:
    """Copy a SentencePiece model. Its end-of-sentence token ends a document."""
    shutil.copyfile(model, folder / _SPM_FILE)
    try:
        return _sentencepiece_spec(folder)
    except (RuntimeError, OSError):
        raise ConfigError(f"--tokenizer-model={str(model)!r}: must be a SentencePiece model file") from None


def _sentencepiece_spec(folder: Path) -> TokenizerSpec:
    """Return the spec of the SentencePiece model in the folder, which must have an end-of-sentence piece."""
    spm = _need("sentencepiece").SentencePieceProcessor(model_file=str(folder / _SPM_FILE))
    if spm.eos_id() < 0:
        raise ConfigError("--tokenizer-model: must have an end-of-sentence piece, which ends a document")
    return TokenizerSpec(SENTENCEPIECE, _SPM_FILE, spm.get_piece_size(), spm.eos_id())


def save_hugging_face(folder: Path, name: str, trust_remote_code: bool) -> TokenizerSpec:
    """Save a Hugging Face tokenizer, given by folder or name. Its end-of-sequence token ends a document."""
    tokenizer = _load_hf(name, trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--tokenizer-model={name!r}: must have an end-of-sequence token, which ends a document")
    target = folder / _HF_FOLDER
    tokenizer.save_pretrained(str(target))
    runs_code = type(tokenizer).__module__.startswith("transformers_modules.")
    return TokenizerSpec(HUGGING_FACE, _HF_FOLDER, len(tokenizer), tokenizer.eos_token_id, runs_code)


def build_gpt2(folder: Path, vocab_file: Path, merges_file: Path) -> TokenizerSpec:
    """Save GPT-2's byte-level BPE, given by its two files.

    It is saved as a Hugging Face tokenizer, because Megatron's GPT2BPETokenizer downloads a configuration even if it
    has both files.
    """
    library, transformers = _need("tokenizers"), _need("transformers")
    eod = "<|endoftext|>"
    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
        bpe = library.ByteLevelBPETokenizer(str(vocab_file), str(merges_file))
    except Exception as error:  # the Rust side raises plain Exception
        names = f"--vocab-file={str(vocab_file)!r} --merges-file={str(merges_file)!r}"
        raise ConfigError(f"{names}: must be the two files of GPT-2's tokenizer: {_first_line(error)}") from None
    if eod not in vocabulary:
        raise ConfigError(f"--vocab-file={str(vocab_file)!r}: must contain {eod}, which ends a document")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=eod, bos_token=eod, unk_token=eod
    )
    tokenizer.save_pretrained(str(folder / _HF_FOLDER))
    return TokenizerSpec(HUGGING_FACE, _HF_FOLDER, len(tokenizer), tokenizer.eos_token_id)


def _load_hf(name: str, trust_remote_code: bool) -> Any:
    """Load a Hugging Face tokenizer by folder or name. Any error of its library becomes a ConfigError of one line."""
    transformers = _need("transformers")
    try:
        # The library's default, None, asks a question on the terminal.
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # its parsers raise errors of many kinds
        if "trust_remote_code" in str(error):
            raise ConfigError(f"--tokenizer-model={name!r}: {NEEDS_TRUST}") from None
        rule = "must be the folder of a Hugging Face tokenizer or its name on the hub"
        raise ConfigError(f"--tokenizer-model={name!r}: {rule}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _need(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(f"--tokenizer: needs the package {package}: pip install {package}") from None
