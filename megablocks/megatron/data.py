"""Data for the training driver: flags from a prepared folder, verification at the start, Megatron's own data sets.

A folder made by `scripts/prepare_data.py` sets five of Megatron's flags (`flags_of_folder`). Before Megatron
starts, `open_data` reads every byte once on the first process of each host; the others wait at the rendezvous.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch.utils.data import Subset

from megablocks.config import refuse
from megablocks.data.indexed import DataError, check_dataset, read_index
from megablocks.data.manifest import read_manifest
from megablocks.data.verify import prefix_fingerprint, verify_folder
from megablocks.megatron.wrap import wrap

_SPLITS = ("train", "valid", "test")
_FIXED_SEED = 1234
"""Draws the samples of --megablocks-fixed-validation."""

_SOURCES = (
    "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path",
)  # fmt: skip
"""Megatron's flags that name data."""


def flags_of_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The names and values of Megatron's arguments that a prepared folder sets. Reads only its manifest.

    Raises DataError if there is no folder or no manifest, or the manifest is damaged.
    """
    manifest = read_manifest(folder)
    return {
        "train_data_path": [str(manifest.prefix("train"))],
        "valid_data_path": [str(manifest.prefix("valid"))],
        "tokenizer_type": manifest.tokenizer_type,
        "tokenizer_model": str(manifest.tokenizer_path),
        "vocab_size": manifest.vocab_size,
    }


def check_named(args: argparse.Namespace) -> None:
    """Refuse a run whose flags name no data or no tokenizer, before Megatron builds its default tokenizer.

    That tokenizer downloads GPT-2's files with the package wget, so an error there would name neither. The ConfigError
    names the flag that is missing.
    """
    if not args.mock_data and not any(getattr(args, name) for name in _SOURCES):
        refuse("data_prefix", None, "--data-prefix, --data-path or --mock-data is required")
    has_files = args.vocab_file is not None and args.merge_file is not None
    has_default = args.tokenizer_type is None and not has_files and not args.use_checkpoint_args
    if has_default and find_spec("wget") is None:
        rule = "--tokenizer-type is required without --data-prefix, for example NullTokenizer with --vocab-size"
        refuse("tokenizer_type", None, rule)
    if args.tokenizer_type == "NullTokenizer" and not (args.vocab_size or args.use_checkpoint_args):
        refuse("vocab_size", args.vocab_size, "--vocab-size is required with --tokenizer-type NullTokenizer")
    if not args.mock_data:
        _check_splits(args)


def _check_splits(args: argparse.Namespace) -> None:
    """Refuse data without a split that the run reads. Megatron would fail only when it reads it, perhaps late."""
    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is not None and args.split is None:
        return  # Megatron's default has all
    if blend is None:
        there = [one is not None for one in per_split]
    else:
        there = [share > 0 for share in parse_and_normalize_split(args.split)]
    for name, is_there, is_read, rule in (
        ("train", there[0], not args.skip_train, "is read by each training step; give it, or --skip-train"),
        ("valid", there[1], "valid" in _read(args), "is read by each evaluation; give it, or --eval-iters 0"),
    ):
        if is_read and not is_there:
            if blend is None:
                refuse(f"{name}_data_path", None, rule)
            refuse("split", args.split, f"holds nothing for {name}, which {rule}")


def _read(args: argparse.Namespace) -> set[str]:
    """The splits whose samples a run reads."""
    return set(_SPLITS) if args.eval_iters > 0 or args.full_validation else {"train"}


def open_data(args: argparse.Namespace) -> str | None:
    """Verify the run's data and return their fingerprint, which a checkpoint keeps and a resumed run compares.

    Call it after the flags are validated and before `pretrain`. The first process of each host reads everything. The
    others read only the folder's manifest, or nothing with --data-path.

    Returns:
        the fingerprint; None with --mock-data, and with --data-path on other processes than the first of a host.

    Raises:
        DataError: a file is missing or damaged, or a split is smaller than one sample.
    """
    if args.mock_data:
        return None
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if args.data_prefix is not None:
        if not first:
            return read_manifest(args.data_prefix).fingerprint
        manifest, _ = verify_folder(args.data_prefix, args.trust_remote_code)
        for split, counts in manifest.splits.items():
            if split in _read(args):
                _check_sample(manifest.prefix(split), counts["tokens"], args)
        return manifest.fingerprint
    if not first:
        return None
    reports = []
    for prefix, shares in _prefixes(args):
        reports.append(check_dataset(prefix, args.padded_vocab_size))
        lengths = read_index(prefix).lengths
        for begin, end in shares:
            first_sequence, last_sequence = round(begin * lengths.size), round(end * lengths.size)
            _check_sample(Path(prefix), int(lengths[first_sequence:last_sequence].sum()), args)
    return prefix_fingerprint(reports)


def _prefixes(args: argparse.Namespace) -> list[tuple[str, list[tuple[float, float]]]]:
    """Every data set of the flags, with the parts (begin, end in 0 to 1) of its sequences that this run reads."""
    used = [split in _read(args) for split in _SPLITS]
    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is not None:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        shares = [share for share, wanted in zip(matrix, used, strict=True) if share is not None and wanted]
        return [(prefix, shares) for prefix in blend[0]]
    blends = [one for one, wanted in zip(per_split, used, strict=True) if one is not None and wanted]
    return [(prefix, [(0.0, 1.0)]) for one in blends for prefix in one[0]]


def _check_sample(prefix: Path, tokens: int, args: argparse.Namespace) -> None:
    # Megatron would silently repeat a smaller data set within one sample.
    if tokens < args.seq_length + 1:
        raise DataError(
            f"{prefix}.bin: a split of {tokens} tokens, less than one sample of --seq-length {args.seq_length} plus 1; "
            "use more data or a smaller --seq-length"
        )


def datasets_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The training, validation and test set of the flags: Megatron's `train_valid_test_datasets_provider`.

    Args:
        num_samples: of the three sets; None for one epoch.
        vp_stage: virtual pipeline stage that the sets are built for.
    """
    args = get_args()
    if not (args.megablocks_fixed_validation and num_samples[1]):
        return tuple(_build(args, num_samples, _config(args, args.seed), vp_stage))
    train, _, test = _build(args, num_samples, _only(_config(args, args.seed), "train", "test"), vp_stage)
    evaluation = args.eval_iters * args.eval_global_batch_size
    one = _only(_config(args, _FIXED_SEED), "valid")
    _, valid, _ = _build(args, [0, evaluation, 0], one, vp_stage)
    if valid is not None:
        # A resumed run starts after the samples that its evaluations have read.
        total = args.consumed_valid_samples + num_samples[1]
        valid = Subset(valid, [index % evaluation for index in range(total)])
        valid.split = Split.valid  # type: ignore[attr-defined]  # Megatron's loader takes its micro-batch from it
    return train, valid, test


# Every rank must call the provider; the builder decides which ones open the data sets.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def install() -> None:
    """Give every data loader a random generator of its own.

    A loader's iterator draws a seed for its workers, in a resumed run after the default generator has been restored.
    On a CPU dropout draws from the default generator too, so it would differ from a run without a stop.
    """
    wrap(training, build_pretraining_data_loader=_own_generator)


def _own_generator(original: Any, *args: Any) -> Any:
    loader = original(*args)
    if loader is not None:
        loader.generator = torch.Generator().manual_seed(get_args().seed)
    return loader


def _build(args: argparse.Namespace, sizes: Sequence[int | None], config: Any, vp_stage: int | None) -> Any:
    """The data sets of these sizes, in samples: those of --data-path, or mock data."""
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, list(sizes), partial(_is_read_here, vp_stage=vp_stage), config).build()


def _only(config: Any, *splits: str) -> Any:
    """Change `config` so that it builds these splits, and None for the others."""
    for name in ("blend_per_split", "split_matrix"):
        if (parts := getattr(config, name)) is not None:
            chosen = [part if split in splits else None for split, part in zip(_SPLITS, parts, strict=True)]
            setattr(config, name, chosen)
    return config


def _config(args: argparse.Namespace, seed: int) -> Any:
    blend, per_split = get_blend_and_blend_per_split(args)
    counts = args.per_dataset_sequences_path
    fields = dataclasses.fields(GPTDatasetConfig)
    return GPTDatasetConfig(
        **{field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)},
        random_seed=seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        path_to_cache=cache_folder(args),
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=None if counts is None else json.loads(Path(counts).read_text()),
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def cache_folder(args: argparse.Namespace) -> str | None:
    """The folder of Megatron's sample indices: `--data-cache-path`, or one in the run's folder, None without either.

    So the data folder can be read-only, and holds only the files that its manifest lists.
    """
    if args.data_cache_path is not None:
        return args.data_cache_path
    root = args.megablocks_run_dir or args.save
    return None if root is None else os.path.join(root, "data_cache")


def _is_read_here(vp_stage: int | None = None) -> bool:
    """Whether this rank's pipeline stage reads samples; the other tensor-parallel ranks get them from rank 0."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_ahead(vp_stage)


def predicts_ahead(vp_stage: int | None) -> bool:
    """Whether this rank's stage has layers of multi-token prediction, which read tokens too."""
    if not get_args().mtp_num_layers:  # called for each micro-batch; building the config takes 0.4 ms
        return False
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
