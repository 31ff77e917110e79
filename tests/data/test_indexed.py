"""The binary format: equal to Megatron's in both directions, and strict where Megatron's reader trusts the file."""

import struct

import numpy as np
import pytest

from megablocks.data import indexed
from megablocks.data.indexed import HEADER, DataError, Index, IndexedWriter, check_dataset, read_index, token_dtype

DOCUMENTS = [np.arange(5), np.array([7]), np.arange(100, 160), np.arange(3)]


@pytest.fixture
def prefix(tmp_path):
    writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    for document in DOCUMENTS:
        writer.add(document)
    writer.close()
    return tmp_path / "set"


def edit(path, offset, replacement):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(replacement)] = replacement
    path.write_bytes(raw)


def refusal(prefix, vocab_size=None):
    with pytest.raises(DataError) as caught:
        check_dataset(prefix, vocab_size)
    message = str(caught.value)
    assert "\n" not in message and str(prefix) in message
    return message


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_reads_our_files_and_writes_the_same_bytes(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    writer = IndexedWriter(ours, np.dtype(dtype))
    builder = indexed.IndexedDatasetBuilder(f"{theirs}.bin", dtype=np.dtype(dtype).type)
    for document in DOCUMENTS:
        writer.add(document)
        builder.add_document(torch.from_numpy(document), [document.size])
    writer.close()
    builder.finalize(f"{theirs}.idx")
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    dataset = indexed.IndexedDataset(str(ours))
    assert len(dataset) == len(DOCUMENTS) and dataset.index.dtype == np.dtype(dtype)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(np.array(dataset[number]), document)
    report = check_dataset(theirs, 160)
    assert (report.documents, report.tokens, report.dtype) == (4, 69, dtype)


def test_token_dtype_is_megatrons_choice():
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for size in (1, 8192, 51200, 65499, 65500, 65536, 200_000):
        assert token_dtype(size) == np.dtype(indexed.DType.optimal_dtype(size))


@pytest.mark.parametrize("cut", [1, 2, 60, 138])
def test_D1_truncated_bin(prefix, cut):
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-cut])
    assert "set.bin: truncated" in refusal(prefix)


def test_D1_bin_longer_than_its_index(prefix):
    with open(prefix.with_suffix(".bin"), "ab") as stream:
        stream.write(b"\0\0")
    assert "set.bin: longer than its index: 140 bytes, but set.idx describes 138" in refusal(prefix)


def test_D1_missing_bin(prefix):
    prefix.with_suffix(".bin").unlink()
    assert "set.bin: no such file" in refusal(prefix)


@pytest.mark.parametrize("keep", [0, 8, 33, 34, 40, 100])
def test_D2_truncated_idx(prefix, keep):
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:keep])
    assert "set.idx: truncated" in refusal(prefix)


@pytest.mark.parametrize(
    ("offset", "replacement", "reason"),
    [
        (0, b"GARBLED", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2, must be 1"),
        (17, b"\x06", "token dtype code 6"),
        (17, b"\xff", "token dtype code 255"),
        (18, struct.pack("<Q", 3), "garbled"),
        (18, struct.pack("<Q", 2**60), "truncated"),
        (26, struct.pack("<Q", 0), "garbled"),
        (HEADER.size + 48, struct.pack("<q", 1), "document boundaries"),
        (HEADER.size + 48 + 32, struct.pack("<q", 5), "document boundaries"),
        (HEADER.size + 48 + 8, struct.pack("<q", 3), "document boundaries"),
    ],
    ids=[
        "magic",
        "version",
        "float dtype",
        "unknown dtype",
        "fewer sequences",
        "2**60 sequences",
        "no documents",
        "first boundary",
        "last boundary",
        "falling boundaries",
    ],
)
def test_D2_garbled_idx(prefix, offset, replacement, reason):
    edit(prefix.with_suffix(".idx"), offset, replacement)
    message = refusal(prefix)
    assert "set.idx: " in message and reason in message


def test_D3_pointer_past_the_file(prefix):
    edit(prefix.with_suffix(".idx"), HEADER.size + 16 + 8 * 3, struct.pack("<q", 10**12))
    assert "the pointer of sequence 3 is 1000000000000, but the lengths before it give 132" in refusal(prefix)


def test_D3_negative_length(prefix):
    edit(prefix.with_suffix(".idx"), HEADER.size + 4, struct.pack("<i", -7))
    assert "set.idx: sequence 1 has the negative length -7" in refusal(prefix)


def test_more_tokens_than_32_bits_count():
    lengths = np.full(3, 2**31 - 1, dtype="<i4")
    assert Index(np.dtype("uint16"), lengths, np.arange(4)).tokens == 3 * (2**31 - 1)
    assert indexed._starts(lengths, 2).tolist() == [0, 2**32 - 2, 2**33 - 4]


def test_the_tokens_are_on_disk_before_their_index(tmp_path, monkeypatch):
    writer, synced = IndexedWriter(tmp_path / "set", np.dtype("uint16")), []
    monkeypatch.setattr(indexed, "sync", lambda path: synced.append((path, (tmp_path / "set.idx").exists())))
    writer.close()
    assert synced == [(tmp_path / "set.bin", False)]


def test_D3_token_beyond_the_vocabulary(prefix, monkeypatch):
    monkeypatch.setattr(indexed, "_CHUNK", 64)
    assert "set.bin: token 65 has the id 159, must be in [0, 159)" in refusal(prefix, 159)
    assert check_dataset(prefix, 160).tokens == 69


def test_D3_negative_token(tmp_path):
    writer = IndexedWriter(tmp_path / "set", np.dtype("int32"))
    writer.add(np.array([1, 2, -3]))
    writer.close()
    assert "set.bin: token 2 has the id -3" in refusal(tmp_path / "set", 10)


def test_D4_empty_documents_are_read(tmp_path):
    writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    for document in ([], [1, 2], [], [], [3], []):
        writer.add(np.array(document, dtype=np.int64))
    writer.close()
    assert check_dataset(tmp_path / "set", 4).tokens == 3
    np.testing.assert_array_equal(read_index(tmp_path / "set").lengths, [0, 2, 0, 0, 1, 0])


def test_D4_empty_shard(tmp_path):
    IndexedWriter(tmp_path / "set", np.dtype("uint16")).close()
    assert read_index(tmp_path / "set").tokens == 0
    assert "set.bin: holds no tokens" in refusal(tmp_path / "set")
