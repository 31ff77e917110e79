"""The README's example runs, and the files, scripts and flags that it names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_layer_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.+?)```", README, re.S)
    assert len(example.splitlines()) <= 11
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["x"].grad.abs().sum() > 0
    assert "torch.Size([4, 32, 64])" in capsys.readouterr().out


def _brace_expansion(text: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", text)
    if not match:
        return [text]
    head, tail = text[: match.start()], text[match.end() :]
    return [name for part in match[1].split(",") for name in _brace_expansion(head + part + tail)]


def test_named_scripts_exist() -> None:
    words = re.findall(r"(?:exp|scripts|third_party)/[\w{},./]+\.(?:sh|py)", README)
    assert words
    for word in words:
        for path in _brace_expansion(word):
            if not path.startswith("third_party/Megatron-LM/"):
                assert (ROOT / path).is_file(), path


def test_tree_names_every_folder() -> None:
    tree = README.split("## The tree")[1].split("## Results")[0]
    for folder in (ROOT / "megablocks").iterdir():
        if (folder / "__init__.py").is_file():
            assert f"      {folder.name}/ " in tree, folder.name
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for folder in {line.split("/")[0] for line in tracked.splitlines() if "/" in line and line[0] != "."}:
        assert f"    {folder}/ " in tree, folder
    for line in tree.splitlines():
        name = re.match(r"      (\w+)/ ", line)
        if name:
            assert (ROOT / "megablocks" / name[1] / "__init__.py").is_file(), name[1]


def test_no_emoji_in_text_files() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert not re.search("[\U0001f000-\U0001ffff\u2600-\u27bf]", (ROOT / name).read_text()), name
