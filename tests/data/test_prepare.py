"""Preparation: what goes in comes out, the same every time, whole or not at all."""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from megablocks.data import pipeline, prepare, sources
from megablocks.data.indexed import DataError, read_index
from megablocks.data.manifest import read_manifest
from megablocks.data.prepare import main
from megablocks.data.tokenizers import TokenizerSpec, load_tokenizer
from megablocks.data.verify import verify_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "prepare_data.py")]


def tree(folder):
    """Every file's path and hash."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents(folder, split):
    """The token arrays of one split."""
    index = read_index(folder / split)
    tokens = np.fromfile(folder / f"{split}.bin", index.dtype)
    return np.split(tokens, np.cumsum(index.lengths)[:-1])


def decoded(folder):
    """All texts of a SentencePiece folder, decoded, the end-of-document token checked and cut."""
    spm = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = []
    for split in ("train", "valid"):
        for ids in documents(folder, split):
            assert ids[-1] == read_manifest(folder).eod and (ids[:-1] != read_manifest(folder).eod).all()
            texts.append(spm.decode(ids[:-1].tolist()))
    return texts


def run(*arguments, **kwargs):
    return subprocess.run([*SCRIPT, *map(str, arguments)], capture_output=True, text=True, **kwargs)


def refused(*arguments, **kwargs):
    """The one line that a bad call ends with."""
    result = run(*arguments, **kwargs)
    assert result.returncode == 2, result
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("prepare_data: error: "), result.stderr
    return lines[0]


def test_every_text_decodes_to_itself(corpus, prepared):
    expected = sorted(path.read_text("utf-8") for path in corpus.rglob("module*.py"))
    expected.append((corpus / "latin.txt").read_text("latin-1"))
    assert sorted(decoded(prepared)) == sorted(expected)


def test_manifest_counts_and_entropies(corpus, prepared):
    manifest, lines = verify_folder(prepared)
    assert any("SHA-256 of 5 files" in line for line in lines)
    content = json.loads((prepared / "manifest.json").read_text())
    assert content["source"]["skipped"] == 1 and content["source"]["documents"] == 42  # the binary; not the empty file
    raws = {path.relative_to(corpus).as_posix(): path.read_bytes() for path in corpus.rglob("[!.]*") if path.is_file()}
    keyed = (key.encode() + b"\0" + hashlib.sha256(raw).digest() for key, raw in sorted(raws.items()) if raw)
    assert content["source"]["sha256"] == hashlib.sha256(b"".join(keyed)).hexdigest()
    assert sum(counts["documents"] for counts in manifest.splits.values()) == 41
    valid = np.concatenate(documents(prepared, "valid")).astype(np.int64)
    train = np.concatenate(documents(prepared, "train")).astype(np.int64)
    assert manifest.splits["valid"]["tokens"] == valid.size and manifest.splits["train"]["tokens"] == train.size
    counts = {token: int((valid == token).sum()) for token in set(valid.tolist())}
    entropy = -sum(n / valid.size * np.log(n / valid.size) for n in counts.values())
    assert manifest.unigram["valid_entropy"] == pytest.approx(entropy, abs=1e-8)
    cross = -sum(n * np.log(((train == t).sum() + 1) / (train.size + 600)) for t, n in counts.items()) / valid.size
    assert manifest.unigram["valid_cross_entropy"] == pytest.approx(cross, abs=1e-8)


def test_D6_rerun_is_identical_whatever_the_workers(corpus, prepared, tmp_path, monkeypatch):
    out = tmp_path / "again"
    arguments = ["--input", str(corpus), "--out", str(out), "--vocab-size", "600"]
    monkeypatch.setattr(pipeline, "_BATCH_DOCUMENTS", 2)  # many batches, several on their way at any time
    assert main([*arguments, "--workers", "3"]) == 0
    assert tree(out) == tree(prepared)
    (tmp_path / ".again.old" / "train").mkdir(parents=True)  # of a run that was killed before it removed the old set
    assert main([*arguments, "--workers", "1", "--overwrite"]) == 0
    assert tree(out) == tree(prepared) and [path.name for path in tmp_path.iterdir()] == ["again"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from megablocks.data import prepare
original = prepare.{where}
def die(*arguments, **options):
    {action}
    os.kill(os.getpid(), signal.SIGKILL)
prepare.{where} = die
prepare.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("where", "action"),
    [
        ("unigram_statistics", "pass"),  # all tokens are written, no manifest yet
        ("write_manifest", "pass"),
        ("_put_in_place", "pass"),  # the manifest is written, the folder not yet in place
    ],
)
def test_D6_interrupted_preparation_leaves_nothing_that_passes(corpus, prepared, tmp_path, where, action):
    out = tmp_path / "set"
    arguments = ["--input", str(corpus), "--out", str(out), "--vocab-size", "600", "--workers", "1"]
    program = KILLED.format(root=str(ROOT), where=where, action=action)
    killed = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists() and (tmp_path / ".set.partial").is_dir()
    assert "no such data folder" in refused("verify", out)
    if where != "_put_in_place":
        assert "manifest.json: missing" in refused("verify", tmp_path / ".set.partial")
    assert main(arguments) == 0  # over the leftovers
    assert tree(out) == tree(prepared) and [path.name for path in tmp_path.iterdir()] == ["set"]


def test_D6_interrupted_replacement_keeps_the_old_set_whole(corpus, folder, tmp_path):
    before = tree(folder)
    arguments = ["--input", str(corpus), "--out", str(folder), "--vocab-size", "550", "--workers", "1", "--overwrite"]
    program = KILLED.format(root=str(ROOT), where="_put_in_place", action="pass")
    killed = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert tree(folder) == before and run("verify", folder).returncode == 0


def test_D6_a_dead_worker_ends_the_preparation(corpus, tmp_path):
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from megablocks.data import pipeline, prepare\n"
        "def die(batch): os._exit(9)\n"
        "pipeline._encode_in_worker = die\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(prepare.main(sys.argv[1:]))\n"
    )
    script = tmp_path / "die.py"
    script.write_text(program)
    arguments = ["--input", corpus, "--out", tmp_path / "set", "--vocab-size", 600, "--workers", 2]
    result = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 2 and "a worker died" in result.stderr.strip().splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["die.py"]


def test_workers_end_with_a_killed_parent(tmp_path):
    """Otherwise each would wait for ever on a pipe that it holds open itself."""
    program = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from megablocks.data import prepare\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(prepare.main(sys.argv[1:]))\n"
    )
    script = tmp_path / "run.py"
    script.write_text(program)
    arguments = [str(script), "--out", str(tmp_path / "set"), "--workers", "2", "--include", "*.py"]
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        workers = []
        deadline = time.monotonic() + 600
        while not workers and time.monotonic() < deadline:
            time.sleep(0.05)
            workers = [pid for pid in _children(process.pid) if "spawn_main" in _command(pid)]
        assert workers, "the pool started"
        process.kill()
        process.wait()
        while any(_command(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in workers if _command(pid)]
    finally:
        process.kill()
        process.wait()


def _children(pid):
    try:
        return [int(word) for word in open(f"/proc/{pid}/task/{pid}/children").read().split()]
    except OSError:
        return []


def _command(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return ""


def test_jsonl(tmp_path):
    names = [f"{a}{b}{c}" for a in ("da", "mi", "ro") for b in ("ka", "lu", "ne") for c in ("st", "vor", "zip")]
    texts = [f"{name} {names[-i]}\nwith {names[i * 7 % 27]}-line, {'x' * i}" for i, name in enumerate(names)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "id": i}) for i, text in enumerate(texts)) + "\n\n")
    out = tmp_path / "set"
    assert main(["--input", str(path), "--jsonl-field", "body", "--out", str(out), "--vocab-size", "390"]) == 0
    assert sorted(decoded(out)) == sorted(texts)
    assert "data.jsonl: line 1: the field 'text' holds no text" in refused("--input", path, "--out", tmp_path / "b")
    good, out = path.read_text(), tmp_path / "c"
    for broken in ("{broken", "[" * 100_000, "1" * 5000):
        path.write_text(f"{good}{broken}\n")
        assert "data.jsonl: line 29: not valid JSON" in refused("--input", path, "--jsonl-field", "body", "--out", out)


def test_jsonl_files_in_a_folder_are_no_documents_by_accident(tmp_path):
    """Each file was one document, so that the model learned JSON."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("a.jsonl", "b.ndjson", "c.txt", "d.txt"):
        (folder / name).write_text('{"text": "one two"}\n')
    with tarfile.open(tmp_path / "shards.tar", "w") as archive:
        archive.add(folder, "shards")
    for source, key in ((folder, "a.jsonl"), (tmp_path / "shards.tar", "shards/a.jsonl")):
        line = refused("--input", source, "--out", tmp_path / "set")
        assert f"--input={str(source)!r}: holds {key}, whose lines would be one document; give such files" in line
    environment = {**os.environ, "DRY_RUN": "1"}
    for chosen, number in ((["--exclude", "*.jsonl", "*.ndjson"], 2), (["--include", "*"], 4)):
        done = run("--input", folder, "--out", tmp_path / "set", *chosen, env=environment)
        assert done.returncode == 0 and f"{number} documents, " in done.stdout + done.stderr


def test_half_a_surrogate_pair_in_json_is_a_question_mark(tmp_path):
    """Text that was cut between the two halves of an emoji. It ended the training of the vocabulary."""
    names = [f"{a}{b}{c}" for a in ("da", "mi", "ro") for b in ("ka", "lu", "ne") for c in ("st", "vor", "zip")]
    texts = [f"{name} {names[-i]} {names[i * 7 % 27]} \ud83d" for i, name in enumerate(names)]
    path, out = tmp_path / "data.jsonl", tmp_path / "set"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert main(["--input", str(path), "--out", str(out), "--vocab-size", "390", "--workers", "1"]) == 0
    assert sorted(decoded(out)) == sorted(text.replace("\ud83d", "?") for text in texts)


def test_files_that_are_no_text_do_not_train_the_vocabulary(corpus, tmp_path):
    """Pictures and the like took pieces from the text. They are in neither split."""
    both = Path(shutil.copytree(corpus, tmp_path / "both"))
    for number in range(20):
        (both / f"{number}.png").write_bytes(b"\0" + bytes(range(0xC0, 0x100)) * 40)
    made = []
    for folder in (corpus, both):
        out = tmp_path / f"{folder.name}-set"
        assert main(["--input", str(folder), "--out", str(out), "--vocab-size", "600", "--workers", "1"]) == 0
        made.append({name: digest for name, digest in tree(out).items() if name != "manifest.json"})
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "text", "--out", ""], "--out='': must be a path; . is the current folder"),
        (["--input", "", "--out", "set"], "--input='': must be a path; . is the current folder"),
        (["verify", ""], "'' is no data folder; give its path, . for the current folder"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(arguments, said, tmp_path, monkeypatch, capsys):
    """In an empty folder the whole preparation ran, and put a data set in its place."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"prepare_data: error: {said}\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tar_equals_folder(corpus, prepared, tmp_path, mode):
    path = tmp_path / ("set.tar" + mode[1:].replace(":", "."))
    with tarfile.open(path, mode) as archive:
        for file in sorted(corpus.rglob("*.*")):
            if file.is_file() and file.name != ".hidden":
                archive.add(file, file.relative_to(corpus).as_posix())
    out = tmp_path / "out"
    assert main(["--input", str(path), "--out", str(out), "--vocab-size", "600", "--workers", "1"]) == 0
    assert {k: v for k, v in tree(out).items() if k != "manifest.json"} == {
        k: v for k, v in tree(prepared).items() if k != "manifest.json"
    }
    assert read_manifest(out).fingerprint == read_manifest(prepared).fingerprint


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "poem.txt").write_bytes("déjà\n".encode("latin-1"))
    source = sources.open_source(str(tmp_path / "poem.txt"), "text")
    assert list(source.entries()) == [sources.Entry("poem.txt", 5)]
    ((key, raw),) = source.read({"poem.txt"})
    assert (key, source.text(key, raw)) == ("poem.txt", "déjà\n")


def test_a_file_that_is_no_text_is_refused_where_it_is_named(corpus, tmp_path, capsys):
    """It was left out, as one of a folder is, beside inputs that have text."""
    path = tmp_path / "more.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "some"}\n' * 9, mtime=0))
    assert main(["--input", str(corpus), str(path), "--out", str(tmp_path / "set"), "--vocab-size", "600"]) == 2
    said = f"--input={str(path)!r}: is no text, because it has NUL bytes; unpack or convert it first"
    assert capsys.readouterr().err == f"prepare_data: error: {said}\n"


def archive_of(texts):
    """An uncompressed tar archive of these texts."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return raw.getvalue()


def test_a_truncated_archive_is_refused(tmp_path):
    raw = archive_of(os.urandom(5000) for _ in range(5))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(raw)[:-9000])
    line = refused("--input", tmp_path / "a.tar.gz", "--out", tmp_path / "set")
    assert "a.tar.gz: not a complete tar archive" in line


def test_an_archive_that_ends_between_documents_or_has_a_damaged_header_is_refused(tmp_path):
    """tarfile takes both for the end: the documents behind it were silently left out."""
    raw, path = archive_of([b"some text"] * 5), tmp_path / "a.tar"
    bad = bytes([raw[2048] ^ 255]) + raw[2049:]
    for damaged in (raw[:2048], raw[:2100], raw[:2048] + bad, raw[:5120]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.tar: not a complete tar archive"):
            list(sources.open_source(str(path), "text").entries())


@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
def test_an_archive_that_was_compressed_in_parts_is_read_whole(packing, tmp_path):
    """As by pbzip2. A changed byte is an error."""
    raw, path = archive_of(b"text %d" % number for number in range(9)), tmp_path / "a.tar.gz"
    packed = packing.compress(raw[:3000]) + packing.compress(raw[3000:])
    path.write_bytes(packed)
    source = sources.open_source(str(path), "text")
    keys = [entry.key for entry in source.entries()]
    assert dict(source.read(set(keys))) == {f"{number}.txt": b"text %d" % number for number in range(9)}
    path.write_bytes(packed[:40] + bytes([packed[40] ^ 255]) + packed[41:])
    with pytest.raises(DataError, match=r"a\.tar\.gz: not a complete tar archive"):
        list(source.entries())


def test_subsets_nest_and_do_not_depend_on_the_order(corpus):
    entries = list(sources.open_source(str(corpus), "text").entries())
    small = sources.choose(entries, 5, None)
    large = sources.choose(entries, 20, None)
    assert len(small) == 5 and len(large) == 20 and {e.key for e in small} < {e.key for e in large}
    assert {e.key for e in sources.choose(entries[::-1], 5, None)} == {e.key for e in small}
    some = sources.choose(entries, None, 20_000)
    assert 0 < sum(entry.size for entry in some) <= 20_000
    keys = {entry.key for entry in entries}
    held = sources.held_out(entries, 0.2)
    assert 1 <= len(held) < len(keys) and sources.held_out(entries[::-1], 0.2) == held
    assert len(sources.held_out(entries, 1e-9)) == 1 and len(sources.held_out(entries, 0.999999)) == len(keys) - 1


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, capsys):
    """Its documents were silently left out. Those of hidden folders are not read anyway."""
    for name in ("a.txt", "b.txt", "inner/c.txt", ".hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")  # which is read under its own name
    source, scandir = sources.open_source(str(tmp_path), "text"), os.scandir
    refused = {".hidden"}

    def scan(path="."):
        if Path(path).name in refused:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert [entry.key for entry in source.entries()] == ["a.txt", "b.txt", "inner/c.txt"]
    refused.add("inner")
    assert main(["--input", str(tmp_path), "--out", str(tmp_path / "set")]) == 2
    assert capsys.readouterr().err == f"prepare_data: error: {tmp_path / 'inner'}: Permission denied\n"


def test_two_documents_of_one_name_are_refused_with_a_way_out(tmp_path, capsys):
    """As the README of two projects."""
    folders = [tmp_path / "both" / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "README").write_text(folder.name)
    assert main(["--input", *map(str, folders), "--out", str(tmp_path / "set")]) == 2
    said = "the document 'README' occurs twice; rename one, or give one folder with both below it"
    assert capsys.readouterr().err.strip().endswith(said)
    names = [entry.key for entry in sources.open_source(str(tmp_path / "both"), "text").entries()]
    assert names == ["a/README", "b/README"]


def test_patterns(corpus, tmp_path):
    base = ["--input", str(corpus), "--out", str(tmp_path / "set")]
    limit = sorted(path.stat().st_size for path in (corpus / "package0").iterdir())[5]
    chosen = ["--include", "*.py", "--exclude", "package1/*", "--max-document-bytes", str(limit)]
    args = prepare.parser().parse_args([*base, *chosen])
    prepare.check_options(args)
    keys = [entry.key for entry in prepare.make_plan(args).entries]
    assert keys and all(key.endswith(".py") and not key.startswith("package1") for key in keys)
    assert max((corpus / key).stat().st_size for key in keys) == limit and "empty.py" not in keys


def test_the_vocabulary_is_trained_without_what_is_held_out(corpus, tmp_path, monkeypatch):
    args = prepare.parser().parse_args(["--input", str(corpus), "--out", str(tmp_path / "set")])
    prepare.check_options(args)
    plan, seen = prepare.make_plan(args), []
    monkeypatch.setattr(prepare.tokenizers, "train_sentencepiece", lambda folder, texts, size: seen.extend(texts))
    prepare._make_tokenizer(args, plan, tmp_path)
    held_out = {(corpus / key).read_text("utf-8") for key in plan.valid if key.endswith(".py")}
    assert held_out and not held_out & set(seen) and len(seen) == len(plan.entries) - len(plan.valid) - 1  # the binary


def test_the_standard_library_is_the_default_corpus(tmp_path):
    """Without a download: every document is a .py file, tests and installed packages are left out."""
    args = prepare.parser().parse_args(["--out", str(tmp_path / "set")])
    prepare.check_options(args)
    plan = prepare.make_plan(args)
    keys = {entry.key for entry in plan.entries}
    assert {"argparse.py", "asyncio/tasks.py"} <= keys and all(key.endswith(".py") for key in keys)
    assert not {part for key in keys for part in key.split("/")} & {"test", "tests", "site-packages"}
    assert sum(entry.size for entry in plan.entries) > 5e6 and 10 <= len(plan.valid) <= 0.1 * len(keys)


def test_given_sentencepiece_model(corpus, prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "set"
    model = str(prepared / "tokenizer.model")
    assert main(["--input", str(corpus), "--out", str(out), "--tokenizer-model", model, "--workers", "1"]) == 0
    assert read_manifest(out).fingerprint == read_manifest(prepared).fingerprint
    line = refused("--input", corpus, "--out", tmp_path / "b", "--tokenizer-model", corpus / "latin.txt")
    assert "must be a SentencePiece model file" in line
    binary = tmp_path / "binary"
    binary.mkdir()
    for name in ("a", "b"):
        (binary / name).write_bytes(b"\0")
    assert main(["--input", str(binary), "--out", str(tmp_path / "c"), "--tokenizer-model", model]) == 2
    assert "train.bin: no tokens: all documents of this split are empty or no text" in capsys.readouterr().err
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    monkeypatch.setattr(processor, "eos_id", lambda self: -1)
    assert main(["--input", str(corpus), "--out", str(tmp_path / "c"), "--tokenizer-model", model]) == 2
    assert "--tokenizer-model: must have an end-of-sentence piece" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gpt2_files(corpus, tmp_path_factory):
    """vocab.json and merges.txt of a small byte-level BPE."""
    library = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("gpt2")
    bpe = library.ByteLevelBPETokenizer()
    files = [str(path) for path in sorted(corpus.rglob("module*.py"))]
    bpe.train(files, vocab_size=500, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(root))
    return root


def test_gpt2_and_hugging_face(corpus, gpt2_files, tmp_path):
    """GPT-2's two files give the ids of the tokenizer they came from; its folder works as a Hugging Face one."""
    library = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    gpt2, hf = tmp_path / "gpt2", tmp_path / "hf"
    files = ["--vocab-file", str(gpt2_files / "vocab.json"), "--merges-file", str(gpt2_files / "merges.txt")]
    base = ["--input", str(corpus), "--include", "*.py", "--workers", "1", "--out"]
    assert main([*base, str(gpt2), "--tokenizer", "gpt2", *files]) == 0
    assert main([*base, str(hf), "--tokenizer", "hf", "--tokenizer-model", str(gpt2 / "tokenizer")]) == 0
    assert (gpt2 / "train.bin").read_bytes() == (hf / "train.bin").read_bytes()
    manifest = read_manifest(gpt2)
    vocabulary = json.loads((gpt2_files / "vocab.json").read_text())
    assert (manifest.tokenizer_type, manifest.vocab_size) == ("HuggingFaceTokenizer", len(vocabulary))
    assert manifest.eod == vocabulary["<|endoftext|>"]
    bpe = library.ByteLevelBPETokenizer(str(gpt2_files / "vocab.json"), str(gpt2_files / "merges.txt"))
    expected = {bytes(np.array([*bpe.encode(p.read_text()).ids, manifest.eod], "<u2")) for p in corpus.rglob("mod*.py")}
    assert {bytes(ids) for split in ("train", "valid") for ids in documents(gpt2, split)} == expected
    ids_of = load_tokenizer(gpt2, TokenizerSpec(manifest.tokenizer_type, "tokenizer", len(vocabulary), manifest.eod))
    assert ids_of("") == []
    saved = library.Tokenizer.from_file(str(gpt2 / "tokenizer/tokenizer.json"))
    saved.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", manifest.eod)]
    )
    saved.save(str(gpt2 / "tokenizer/tokenizer.json"))  # as Llama's, which begins each text with a token
    ids_of = load_tokenizer(gpt2, TokenizerSpec(manifest.tokenizer_type, "tokenizer", len(vocabulary), manifest.eod))
    assert ids_of("def") == bpe.encode("def").ids
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    line = refused(*base, tmp_path / "x", "--tokenizer", "hf", "--tokenizer-model", corpus, env=offline)
    assert "must be the folder of a Hugging Face tokenizer" in line


@pytest.mark.parametrize("shift", [50, 70_000])
def test_a_tokenizer_with_gaps_in_its_ids_is_refused(corpus, gpt2_files, tmp_path, shift, capsys):
    """Megatron's embedding has a row for each token, so a larger id has none. It was a traceback of numpy's."""
    pytest.importorskip("transformers")
    vocabulary = json.loads((gpt2_files / "vocab.json").read_text())
    size = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps({k: i + shift * (i > 280) for k, i in vocabulary.items()}))
    files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merges-file", str(gpt2_files / "merges.txt")]
    call = ["--input", str(corpus), "--out", str(tmp_path / "set"), "--tokenizer", "gpt2", *files, "--workers", "1"]
    assert main(call) == 2
    said = rf"\S+: the tokenizer returned the id \d+, must be below {size}, the number of its tokens"
    assert re.fullmatch(f"prepare_data: error: {said}\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--valid-fraction", "1.5"], "--valid-fraction=1.5: must be between 0 and 1"),
        (["--workers", "0"], "--workers=0: must be at least 1"),
        (["--max-bytes", "-3"], "--max-bytes=-3: must be at least 1"),
        (["--vocab-size", "100"], "--vocab-size=100: must be at least 387"),
        (["--vocab-size", "99999999999"], "--vocab-size=99999999999: must be less than 2**31"),
        (["--vocab-size", "200000"], "--vocab-size=200000: SentencePiece cannot train it on this text: "),
        (["--tokenizer", "hf"], "--tokenizer-model=None: --tokenizer=hf needs the folder or name"),
        (["--tokenizer", "gpt2"], "--vocab-file=None: must be a file"),
        (["--vocab-file", "x.json"], "--vocab-file='x.json': is only for --tokenizer=gpt2"),
        (["--tokenizer-model", "/nowhere"], "--tokenizer-model='/nowhere': must be a file"),
        (
            ["--tokenizer-model", __file__, "--vocab-size", "9000"],
            "--vocab-size=9000: is only for a SentencePiece model",
        ),
        (["--max-documents", "1"], "1 of 42 non-empty documents chosen, must be at least 2"),
        (["--include", "*.rs"], "0 of 0 non-empty documents chosen"),
        (["--input", "/nowhere"], "--input='/nowhere': must be the word stdlib, or an existing folder or file"),
    ],
)
def test_bad_options_are_one_line(corpus, tmp_path, capsys, arguments, expected):
    assert main(["--input", str(corpus), "--out", str(tmp_path / "set"), "--workers", "1", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and expected in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_not_touched(corpus, folder, tmp_path):
    before = tree(folder)
    assert "exists; check it with" in refused("--input", corpus, "--out", folder)
    assert tree(folder) == before
    (tmp_path / "empty").mkdir()
    arguments = ["--vocab-size", "600", "--workers", "1"]
    assert main(["--input", str(corpus), "--out", str(tmp_path / "empty"), *arguments]) == 0


def test_too_little_text_for_any_vocabulary_asks_for_more_text(tmp_path):
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / name).write_text("hello world\n")
    line = refused("--input", tmp_path / "text", "--out", tmp_path / "set")
    assert line.endswith("too little text for the minimum of 387 pieces; give more, or --tokenizer-model")


def test_dry_run_writes_nothing(corpus, tmp_path):
    result = run("--input", corpus, "--out", tmp_path / "set", env={**os.environ, "DRY_RUN": "1"})
    assert result.returncode == 0 and "42 documents" in result.stdout and list(tmp_path.iterdir()) == []


def test_another_dry_run_than_0_and_1_is_refused(corpus, tmp_path):
    result = run("--input", corpus, "--out", tmp_path / "set", env={**os.environ, "DRY_RUN": "true"})
    assert result.stderr == "prepare_data: error: DRY_RUN='true': must be 0 or 1\n" and result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_two_preparations_of_one_folder(corpus, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / ".set.partial").mkdir()
    handle = os.open(tmp_path / ".set.partial", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert "another process prepares the same folder" in refused(
            "--input", corpus, "--out", tmp_path / "set", "--vocab-size", 600
        )
    finally:
        os.close(handle)


def test_a_full_disk_is_one_line(corpus, tmp_path):
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *SCRIPT]
    arguments = ["--input", corpus, "--out", tmp_path / "set", "--vocab-size", 600, "--workers", 1]
    program = [*limited, *map(str, arguments)]
    ignored = lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # noqa: E731
    result = subprocess.run(program, capture_output=True, text=True, preexec_fn=ignored)
    assert result.returncode == 2 and "File too large" in result.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_needs_no_torch_and_no_megatron():
    program = "import sys, megablocks.data.prepare, megablocks.data.verify; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert not {"torch", "megatron", "transformers", "sentencepiece"} & set(loaded)


def test_a_missing_package_is_one_line(tmp_path):
    """numpy is imported by the pipeline itself, long before an option is read."""
    command = [sys.executable, "-S", SCRIPT[1], "--out", str(tmp_path / "set")]
    bare = subprocess.run(command, capture_output=True, text=True)
    assert bare.returncode == 2
    assert bare.stderr == "prepare_data: error: numpy is not installed: pip install numpy\n"


def test_file_names_in_an_ascii_locale(corpus, tmp_path):
    """The same bytes as in a UTF-8 locale, from sources and into folders with names that ASCII lacks."""
    source = tmp_path / "größe"
    shutil.copytree(corpus, source)
    (source / "package0").rename(source / "paket_ö")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    arguments = ["--input", source, "--vocab-size", 600, "--exclude", "*ö/module00*", "--workers", 2]
    for out, locale in (("plain", {"PYTHONUTF8": "1"}), ("ausgäbe", ascii_only)):
        result = run("--out", tmp_path / out, *arguments, env={**os.environ, **locale}, encoding="utf-8")
        assert result.returncode == 0, result.stderr
        assert "41 documents" in result.stdout and f"made {tmp_path / out}, " in result.stdout
    assert tree(tmp_path / "ausgäbe") == tree(tmp_path / "plain")
    assert run("verify", tmp_path / "ausgäbe", env={**os.environ, **ascii_only}, encoding="utf-8").returncode == 0
    line = refused("--input", source, "--out", tmp_path / "b\udcff", "--vocab-size", 600)
    assert "must be a UTF-8 path" in line


OWN_TOKENIZER = """
import os, pathlib
from transformers import PreTrainedTokenizerFast
pathlib.Path(os.environ["RAN"]).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizers_own_code_runs_only_when_allowed(corpus, gpt2_files, tmp_path):
    pytest.importorskip("transformers")
    files = ["--vocab-file", str(gpt2_files / "vocab.json"), "--merges-file", str(gpt2_files / "merges.txt")]
    base = ["--input", str(corpus), "--include", "*.py", "--workers", "1", "--out"]
    assert main([*base, str(tmp_path / "gpt2"), "--tokenizer", "gpt2", *files]) == 0
    coded = shutil.copytree(tmp_path / "gpt2/tokenizer", tmp_path / "coded")
    config = json.loads((coded / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (coded / "tokenizer_config.json").write_text(json.dumps(config))
    (coded / "own.py").write_text(OWN_TOKENIZER)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "RAN": str(tmp_path / "ran")}
    hf = ["--tokenizer", "hf", "--tokenizer-model", coded]
    line = refused(*base, tmp_path / "hf", *hf, env=env, input="y\n")
    assert "brings its own Python code: read the code, then allow it with --trust-remote-code" in line
    assert not (tmp_path / "ran").exists() and not (tmp_path / "hf").exists()
    allowed = run(*base, tmp_path / "hf", *hf, "--trust-remote-code", env=env)
    assert allowed.returncode == 0, allowed.stderr
    assert (tmp_path / "ran").exists() and "[y/N]" not in allowed.stdout
    assert (tmp_path / "hf/train.bin").read_bytes() == (tmp_path / "gpt2/train.bin").read_bytes()
    assert main(["verify", str(tmp_path / "hf")]) == 0
    with pytest.raises(DataError, match="tokenizer: the tokenizer brings its own Python code"):
        verify_folder(tmp_path / "hf")
    verify_folder(tmp_path / "hf", trust_remote_code=True)
    verify_folder(tmp_path / "gpt2")


def test_a_folder_that_cannot_be_made_is_one_line(corpus, tmp_path):
    line = refused("--input", corpus, "--out", "/proc/set", "--vocab-size", 600)
    assert "--out='/proc/set': cannot be made (No such file or directory); choose another folder" in line


def test_overwrite_replaces_data_sets_alone(corpus, tmp_path):
    """A wrong --out must not cost a home folder."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("precious")
    for name in ("thesis", "thesis/thesis.tex"):
        line = refused("--input", corpus, "--out", tmp_path / name, "--vocab-size", 600, "--overwrite")
        assert f"--out='{tmp_path / name}': exists and is no data set" in line
    assert (tmp_path / "thesis/thesis.tex").read_text() == "precious"


def test_overwrite_loses_no_file_of_the_users(corpus, folder, tmp_path):
    """Their text, which may be the input, or a folder of another program that has a manifest.json too."""
    text = folder / "raw/text.jsonl"
    text.parent.mkdir()
    text.write_text('{"text": "precious"}\n{"text": "words"}\n')
    for source in (text, corpus):
        line = refused("--input", source, "--out", folder, "--vocab-size", 600, "--overwrite")
        assert line.endswith("holds raw/text.jsonl, which is not of the data set; move it, or choose another folder")
    assert "precious" in text.read_text()
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension/manifest.json").write_text('{"manifest_version": 3}')
    line = refused("--input", corpus, "--out", tmp_path / "extension", "--vocab-size", 600, "--overwrite")
    assert line.endswith("format None, must be 1); choose another folder or remove it")
    assert (tmp_path / "extension/manifest.json").exists()


def test_overwrite_replaces_megatrons_index_files_too(corpus, folder):
    """A run without a run folder leaves them beside the data."""
    indices = folder / "train/cache/GPTDataset_indices"
    indices.mkdir(parents=True)
    (indices / "0a-GPTDataset-train-document_index.npy").write_text("of the old text")
    done = run("--input", corpus, "--out", folder, "--vocab-size", 600, "--overwrite")
    assert done.returncode == 0 and not (folder / "train").exists(), done.stderr


def test_a_mount_point_is_refused_before_the_work(corpus, tmp_path, monkeypatch, capsys):
    """As /data in a container: the finished folder cannot get its name."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "set")
    assert main(["--input", str(corpus), "--out", str(tmp_path / "set"), "--vocab-size", "600"]) == 2
    out = tmp_path / "set"
    assert capsys.readouterr().err == (
        f"prepare_data: error: --out={str(out)!r}: is a mount point, which cannot be renamed; give a folder in it\n"
    )


def test_a_full_disk_is_one_line_with_a_fix(corpus, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "IndexedWriter", full)
    assert main(["--input", str(corpus), "--out", str(tmp_path / "set"), "--vocab-size", "600", "--workers", "1"]) == 2
    said = "prepare_data: error: No space left on device; make room or choose another --out\n"
    assert capsys.readouterr().err == said and not (tmp_path / "set").exists()


def test_a_text_of_long_lines_alone_says_so(tmp_path):
    (tmp_path / "long.jsonl").write_text(2 * f'{{"text": "{"some words " * 2000}"}}\n')
    line = refused("--input", tmp_path / "long.jsonl", "--out", tmp_path / "set", "--vocab-size", 600)
    assert line.endswith("it needs lines of 1 to 16384 bytes; split the lines, or give --tokenizer-model")


def test_a_link_stands_for_its_folder(corpus, tmp_path):
    """A data set on another disk. --overwrite put the new one in the place of the link, and failed the next time."""
    link, disk = tmp_path / "link", tmp_path / "disk"
    link.symlink_to(disk / "set")
    call = ["--input", str(corpus), "--out", str(link), "--vocab-size", "600", "--workers", "1"]
    for more in ([], ["--overwrite"], ["--overwrite"]):
        assert main([*call, *more]) == 0
        assert link.is_symlink() and sorted(os.listdir(tmp_path)) == ["disk", "link"]
        assert os.listdir(disk) == ["set"]
        verify_folder(link)
