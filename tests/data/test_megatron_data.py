"""The driver's side: flags out of a folder, verification before the start, one line for what cannot be trained on."""

import argparse
import json

import numpy as np
import pytest

pytest.importorskip("megatron.training")

from megablocks.data.indexed import DataError, IndexedWriter  # noqa: E402
from megablocks.data.manifest import read_manifest  # noqa: E402
from megablocks.megatron import data  # noqa: E402


def arguments(**changes):
    values = {
        "mock_data": False,
        "data_prefix": None,
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
        "split": None,
        "seq_length": 32,
        "eval_iters": 1,
        "full_validation": False,
        "padded_vocab_size": 640,
        "data_cache_path": None,
        "megablocks_run_dir": None,
        "save": None,
        "trust_remote_code": False,
    }
    return argparse.Namespace(**{**values, **changes})


def write(prefix, *documents):
    writer = IndexedWriter(prefix, np.dtype("uint16"))
    for document in documents:
        writer.add(np.asarray(document))
    writer.close()
    return str(prefix)


def refusal(args, kind=DataError):
    with pytest.raises(kind) as caught:
        data.open_data(args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_stands_for_megatrons_flags(folder):
    flags = data.flags_of_folder(folder)
    assert flags == {
        "train_data_path": [str(folder / "train")],
        "valid_data_path": [str(folder / "valid")],
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": str(folder / "tokenizer.model"),
        "vocab_size": 600,
    }


def test_megatron_loads_the_folders_tokenizer(folder):
    """Its vocabulary, end-of-document id and ids are those of the preparation."""
    from megatron.core.tokenizers import MegatronTokenizer

    manifest = read_manifest(folder)
    path = str(manifest.tokenizer_path)
    tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path=path, metadata_path={"library": "sentencepiece"})
    assert (tokenizer.vocab_size, tokenizer.eod) == (manifest.vocab_size, manifest.eod)
    text = "def f(x):\n\treturn  größe ☃\n"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_open_data_verifies_and_gives_the_fingerprint(folder, monkeypatch):
    manifest = read_manifest(folder)
    assert data.open_data(arguments(data_prefix=str(folder))) == manifest.fingerprint
    (folder / "valid.bin").write_bytes(b"")
    assert "valid.bin: truncated or edited" in refusal(arguments(data_prefix=str(folder)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert data.open_data(arguments(data_prefix=str(folder))) == manifest.fingerprint
    assert data.open_data(arguments(mock_data=True)) is None


def test_D1_truncated_bin_behind_data_path(tmp_path):
    prefix = write(tmp_path / "set", range(50), range(60))
    assert len(data.open_data(arguments(data_path=[prefix], split="1,0,0"))) == 64
    (tmp_path / "set.bin").write_bytes((tmp_path / "set.bin").read_bytes()[:-2])
    assert "set.bin: truncated" in refusal(arguments(data_path=[prefix], split="1,0,0"))


def test_D3_ids_beyond_the_models_vocabulary_behind_data_path(tmp_path):
    prefix = write(tmp_path / "set", range(50), [700])
    assert "set.bin: token 50 has the id 700" in refusal(arguments(train_data_path=[prefix]))


def test_D4_data_set_smaller_than_one_sample(folder, tmp_path):
    tokens = json.loads((folder / "manifest.json").read_text())["splits"]["valid"]["tokens"]
    data.open_data(arguments(data_prefix=str(folder), seq_length=tokens - 1))
    message = refusal(arguments(data_prefix=str(folder), seq_length=tokens))
    assert f"valid.bin: a split of {tokens} tokens, less than one sample of --seq-length {tokens} plus 1" in message
    prefix = write(tmp_path / "set", *[range(20)] * 10)
    data.open_data(arguments(data_path=[prefix], split="80,20,0"))
    assert "set.bin: a split of 20 tokens" in refusal(arguments(data_path=[prefix], split="90,10,0"))
    data.open_data(arguments(data_path=[prefix], split="90,10,0", eval_iters=0))
    data.open_data(arguments(data_prefix=str(folder), seq_length=tokens, eval_iters=0))
    whole = arguments(data_path=[prefix], split="90,10,0", eval_iters=0, full_validation=True)
    assert "set.bin: a split of 20 tokens" in refusal(whole)
    ones = write(tmp_path / "ones", *[[1]] * 50)  # 0.58 * 50 is a little less than 29
    data.open_data(arguments(data_path=[ones], split="58,42,0", seq_length=28, eval_iters=0))


@pytest.mark.parametrize(
    ("rank", "is_end", "ahead"), [(0, True, False), (0, False, True), (0, False, False), (1, True, True)]
)
def test_who_opens_the_data(monkeypatch, rank, is_end, ahead):
    monkeypatch.setattr(data.parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(data, "is_first_or_last_pipeline_stage", lambda stage: is_end)
    monkeypatch.setattr(data, "predicts_ahead", lambda stage: ahead)
    assert data._is_read_here() == (rank == 0 and (is_end or ahead))


def test_D4_empty_shard_in_a_blend(tmp_path):
    full, empty = write(tmp_path / "full", range(50)), write(tmp_path / "empty")
    args = arguments(train_data_path=["0.5", full, "0.5", empty])
    assert "empty.bin: holds no tokens" in refusal(args)


def test_D4_empty_documents_train(tmp_path):
    """Megatron's data set takes samples across them."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    prefix = write(tmp_path / "set", [], range(1, 20), [], [], range(20, 41), [])
    assert data.open_data(arguments(train_data_path=[prefix])) is not None
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=640)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend_per_split=[([prefix], None), None, None],
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    from megablocks.megatron.cpu import skip_compile_helpers

    skip_compile_helpers()
    low = GPTDataset.build_low_level_dataset(prefix, config)
    dataset = GPTDataset(low, prefix, np.arange(6, dtype=np.int32), 4, Split.train, config)
    # Documents are shuffled whole, so a sample is two consecutive runs at most, whatever lies empty between them.
    for number in range(4):
        sample = dataset[number]
        steps = np.flatnonzero(np.diff(sample["tokens"].numpy()) != 1)
        assert sample["tokens"].shape == (8,) and steps.size <= 1 and sample["tokens"].min() >= 1
        assert (sample["labels"][:-1] == sample["tokens"][1:]).all()


def test_sample_indices_stay_out_of_the_data_folder(tmp_path):
    assert data.cache_folder(arguments(save="/run/one")) == "/run/one/data_cache"
    assert data.cache_folder(arguments(save="/a", megablocks_run_dir="/b")) == "/b/data_cache"
    assert data.cache_folder(arguments(save="/a", data_cache_path="/c")) == "/c"
    assert data.cache_folder(arguments()) is None
