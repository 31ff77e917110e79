"""Tokenizers for data preparation: made ready inside the data folder, then loaded from there by every worker.

The files left in the folder are what Megatron loads at training (`--tokenizer-type`, `--tokenizer-model`), so
preparation and training cannot use different ones.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megablocks.config import ConfigError

SENTENCEPIECE = "SentencePieceTokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
_SPM_FILE = "tokenizer.model"
_HF_FOLDER = "tokenizer"
# Reserved ids of a vocabulary trained here; 256 byte pieces follow them.
_UNK, _EOD = 0, 1
MIN_VOCAB_SIZE = 2 + 256 + 1 + 128


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer a data folder holds: Megatron's type, path inside the folder, ids in [0, vocab_size), eod id."""

    type: str
    path: str
    vocab_size: int
    eod: int


class Tokenizer:
    """Text to ids. SentencePiece and Hugging Face behind one call."""

    def __init__(self, folder: Path, spec: TokenizerSpec) -> None:
        self.spec = spec
        if spec.type == SENTENCEPIECE:
            self._spm = _need("sentencepiece").SentencePieceProcessor(model_file=str(folder / spec.path))
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self._hf = _load_hf(str(folder / spec.path))
            self._hf.model_max_length = 1 << 60  # a document may be longer than a model's window: no warning

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no begin, end or padding token."""
        if self.spec.type == SENTENCEPIECE:
            return self._spm.encode(text)
        return self._hf.encode(text, add_special_tokens=False)


def train_sentencepiece(folder: Path, texts: Iterable[str], vocab_size: int) -> TokenizerSpec:
    """Train a byte-pair SentencePiece model of `vocab_size` ids on `texts`, lossless: every string decodes to itself
    (but for U+2581, SentencePiece's own sign for a space).

    Whitespace is kept as it stands, runs of spaces may be pieces, newline is a piece, and characters that are not in
    the vocabulary become bytes. Byte-pair merging is a sequence of integer counts, so the model does not depend on
    the machine or its number of threads.
    """
    spm = _need("sentencepiece")
    model = io.BytesIO()
    # A list first: SentencePiece turns what a generator raises into an error of its own.
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
            max_sentence_length=1 << 14,
            user_defined_symbols=["\n"],
            unk_id=_UNK,
            eos_id=_EOD,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].rpartition("] ")[2]
        raise ConfigError(f"--vocab-size={vocab_size}: SentencePiece cannot train it on this text: {reason}") from None
    (folder / _SPM_FILE).write_bytes(model.getvalue())
    return _sentencepiece_spec(folder)


def copy_sentencepiece(folder: Path, model: Path) -> TokenizerSpec:
    """Use a given SentencePiece model; its end-of-sentence token ends a document."""
    shutil.copyfile(model, folder / _SPM_FILE)
    try:
        return _sentencepiece_spec(folder)
    except (RuntimeError, OSError):
        raise ConfigError(f"--tokenizer-model={str(model)!r}: must be a SentencePiece model file") from None


def _sentencepiece_spec(folder: Path) -> TokenizerSpec:
    spm = _need("sentencepiece").SentencePieceProcessor(model_file=str(folder / _SPM_FILE))
    if spm.eos_id() < 0:
        raise ConfigError("--tokenizer-model: must have an end-of-sentence piece, which ends a document; it has none")
    return TokenizerSpec(SENTENCEPIECE, _SPM_FILE, spm.get_piece_size(), spm.eos_id())


def save_hugging_face(folder: Path, name: str) -> TokenizerSpec:
    """Use a Hugging Face tokenizer, from a folder or by its name; its end-of-sequence token ends a document."""
    tokenizer = _load_hf(name)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--tokenizer-model={name!r}: must have an end-of-sequence token, which ends a document")
    target = folder / _HF_FOLDER
    tokenizer.save_pretrained(str(target))
    return TokenizerSpec(HUGGING_FACE, _HF_FOLDER, len(tokenizer), tokenizer.eos_token_id)


def build_gpt2(folder: Path, vocab_file: Path, merges_file: Path, eod: str = "<|endoftext|>") -> TokenizerSpec:
    """GPT-2's byte-level BPE from its two files.

    Kept as a Hugging Face folder: Megatron's own GPT2BPETokenizer asks the network for a configuration even where
    both files are at hand.
    """
    library, transformers = _need("tokenizers"), _need("transformers")
    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
        bpe = library.ByteLevelBPETokenizer(str(vocab_file), str(merges_file))
    except Exception as error:  # the Rust side raises plain Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--vocab-file={str(vocab_file)!r}: with --merges-file={str(merges_file)!r} must be GPT-2's: {reason}"
        ) from None
    if eod not in vocabulary:
        raise ConfigError(f"--vocab-file={str(vocab_file)!r}: must hold {eod}, which ends a document")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=eod, bos_token=eod, unk_token=eod
    )
    tokenizer.save_pretrained(str(folder / _HF_FOLDER))
    return TokenizerSpec(HUGGING_FACE, _HF_FOLDER, len(tokenizer), tokenizer.eos_token_id)


def _load_hf(name: str) -> Any:
    transformers = _need("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["unknown reason"])[0]
        raise ConfigError(
            f"--tokenizer-model={name!r}: must be a folder of a Hugging Face tokenizer, or a name on its hub: {reason}"
        ) from None


def _need(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(f"--tokenizer: needs the package {package}: pip install {package}") from None
