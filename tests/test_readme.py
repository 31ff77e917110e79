"""README.md, docs/ and benchmarks/notes/ are true: links, examples, commands, flags, fields and paths."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megablocks import Arguments, ConfigError, MoEConfig, clear_load_balancing_loss, config
from megablocks.config import TOKEN_ROUNDINGS
from megablocks.kinds import MLP_IMPLS, ROUTERS
from megablocks.megatron.arguments import ALIASES
from megablocks.megatron.settings import DriverSettings, MegaBlocksSettings
from megablocks.moe import MoELayer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *sorted((ROOT / "benchmarks/notes").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SETTINGS = {f.name: f.default for f in dataclasses.fields(MegaBlocksSettings)}
OF_OTHERS = {"use_reentrant", "cast_forward_inputs", "experts_implementation"}
"""Arguments of torch's checkpoint, of FSDP2's policy, and of transformers."""
DRIVER = {f.name: f.default for f in dataclasses.fields(DriverSettings)}


def _words(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def _commands(text: str) -> list[str]:
    """The lines of indented code blocks; a line that a backslash continues is one. No comments: zsh would run them."""
    joined = re.sub(r"\\\n\s+", "", text)
    lines = re.findall(r"(?m)^    (\S.*)$", joined)
    return [line.strip() for line in lines]


def _flag(name: str) -> str:
    return f"--megablocks-{name.replace('_', '-')}"


def _brace_expansion(text: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", text)
    if not match:
        return [text]
    head, tail = text[: match.start()], text[match.end() :]
    return [name for part in match[1].split(",") for name in _brace_expansion(head + part + tail)]


def _anchors(page: Path) -> set[str]:
    """Names by which GitHub links to the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_fits_in_200_lines() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_pictures_exist(page: Path) -> None:
    text = page.read_text()
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)]:
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def _linked(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return {(page.parent / target.partition("#")[0]).resolve() for target in targets}


def test_every_page_is_linked_from_the_first_ones() -> None:
    linked, start = _linked(GUIDES[0]), ROOT / "docs/index.md"
    assert start in linked
    assert set(GUIDES[1:]) - {start} <= _linked(start), "docs/index.md lists all pages"
    notes = ROOT / "benchmarks/notes"
    listed = re.findall(r"\]\((\w+\.md)\)", (notes / "README.md").read_text())
    assert {notes / name for name in listed} == set(notes.glob("*.md")) - {notes / "README.md"}
    assert notes / "README.md" in linked


@pytest.mark.parametrize("page", GUIDES, ids=NAMES[: len(GUIDES)])
def test_python_blocks_run(page: Path) -> None:
    """A block that cannot run by itself begins with ```python fragment."""
    clear_load_balancing_loss()  # another test in this process may have left some
    for language, block in re.findall(r"(?m)^```(\w[^\n]*)\n(.+?)^```", page.read_text(), re.S):
        if language == "python":
            exec(compile(block, page.name, "exec"), {"__name__": "example"})
        else:
            assert language in ("python fragment", "python torchrun", "bash"), f"{page.name}: {language}"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_program_of_several_processes_runs() -> None:
    """What torchrun starts on the page, started without it: its own import takes as long as the program."""
    page = (ROOT / "docs/parallelism.md").read_text()
    (program,) = re.findall(r"(?m)^```python torchrun\n(.+?)^```", page, re.S)
    assert "`torchrun --nproc-per-node 2 program.py`" in page
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", program]
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(2)]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said == ["0 4 experts here\n", "1 4 experts here\n"]


def test_layer_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.+?)```", README, re.S)
    assert len(example.splitlines()) <= 11
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["x"].grad.abs().sum() > 0
    assert "torch.Size([4, 32, 64])" in capsys.readouterr().out


_OF_PAGES = r"(?:\w+=\S+ )*(?:bash exp/|python scripts/)"


def _cheap(page: Path) -> list[str]:
    """Commands that DRY_RUN=1 makes cheap. Those of the pages may need files that only the reader has."""
    started = r"(?:\w+=\S+ )*(?:bash (?:exp|scripts)/|python scripts/)" if page == GUIDES[0] else _OF_PAGES
    return [c for c in _commands(page.read_text()) if re.match(started, c) and not re.search(" verify | --input ", c)]


COMMANDS = list(dict.fromkeys(command for page in GUIDES for command in _cheap(page)))


def test_the_commands_are_found() -> None:
    assert {"bash exp/smoke/dmoe.sh", "bash scripts/test.sh", "bash exp/megatron_lm/dmoe_spec.sh"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work_as_they_stand(command: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "DRY_RUN": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # In another folder, so that what is there already (data/stdlib) decides nothing.
    line = re.sub(r"\b(bash|python) (exp|scripts)/", rf"\1 {shlex.quote(str(ROOT))}/\2/", command)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["python"], "a dry run writes nothing"


@pytest.mark.parametrize("page", GUIDES, ids=NAMES[: len(GUIDES)])
def test_flags_and_variables_exist(page: Path) -> None:
    text = page.read_text()
    flags = {_flag(name) for name in (*SETTINGS, *DRIVER)}
    named = {flag.replace("--no-", "--") for flag in re.findall(r"--(?:no-)?megablocks-[a-z-]*[a-z]", text)}
    assert named <= flags, named - flags
    source = "".join(path.read_text() for path in (ROOT / "megablocks").rglob("*.py"))
    variables = {"MEGABLOCKS_" + name.upper() for name in SETTINGS}
    variables |= set(re.findall(r'(?:environ\.get|\bswitch)\(\s*"(MEGABLOCKS_\w+)"', source))
    named = set(re.findall(r"\bMEGABLOCKS_[A-Z_]*[A-Z]\b", text))
    assert named <= variables, named - variables


@pytest.mark.parametrize("page", GUIDES, ids=NAMES[: len(GUIDES)])
def test_fields_exist(page: Path) -> None:
    """What is written as a field (`name=…`, or a name that begins like one of MoEConfig's) is one."""
    kinds = (MoEConfig, Arguments, MegaBlocksSettings, DriverSettings)
    fields = {f.name for kind in kinds for f in dataclasses.fields(kind)} | set(inspect.signature(MoELayer).parameters)
    values = {value for choices in vars(config).values() if isinstance(choices, tuple) for value in choices}
    values |= {*ROUTERS}
    beginnings = {f.name.split("_")[0] + "_" for f in dataclasses.fields(MoEConfig) if "_" in f.name}
    for word in _words(page.read_text()):
        name = re.match(r"([a-z]\w*)(=|$)", word)
        if name and (name[2] or any(name[1].startswith(b) for b in beginnings)):
            assert name[1] in fields | values | OF_OTHERS, word


def test_the_tables_of_flags_are_complete() -> None:
    page = (ROOT / "docs/megatron.md").read_text()
    rows = dict(re.findall(r"(?m)^\| `(--megablocks-[a-z-]+)` \| (.+?) \|", page))
    spoken = {"None": "unset", "True": "on", "False": "off", "0.0": "0", "600.0": "600"}
    for name, default in {**SETTINGS, **DRIVER}.items():
        expected = "--save" if name == "run_dir" else spoken.get(str(default), str(default))
        assert rows.pop(_flag(name)).strip("`") == expected, name
    assert not rows
    for name in (*ALIASES, "moe_expert_model_parallelism"):
        assert f"--{name.replace('_', '-')}" in page, name
    assert all(f"`{name}`" in page for name in (*MLP_IMPLS, *TOKEN_ROUNDINGS))
    variables = re.findall(r"(?m)^\| `(MEGABLOCKS_\w+)` \| `--", (ROOT / "docs/environment.md").read_text())
    assert variables == ["MEGABLOCKS_" + name.upper() for name in SETTINGS]


def test_the_table_of_implementations_is_complete() -> None:
    table = README.split("## How to choose an implementation")[1].split("\n## ")[0]
    assert sorted(re.findall(r"(?m)^\| `(\w+)` \| ", table)) == sorted([*MLP_IMPLS, "mlp_impl"])


def test_what_is_refused_is_refused() -> None:
    """docs/saving_memory.md says which implementation takes which quantizer."""
    page = (ROOT / "docs/saving_memory.md").read_text()
    rows = re.findall(r"(?m)^\| `(quantize_\w+)` \| .+? \| ([^(|]+)", page)
    assert len(rows) == 3
    for field, stated in rows:
        refused = set()
        for impl in MLP_IMPLS:
            try:
                MoEConfig(hidden_size=64, ffn_hidden_size=64, num_experts=2, mlp_impl=impl, **{field: 8})
            except ConfigError:
                refused.add(impl)
        assert set(_words(stated)) == refused, field


@pytest.mark.parametrize("page", GUIDES, ids=NAMES[: len(GUIDES)])
def test_named_files_exist(page: Path) -> None:
    words = re.findall(r"(?:exp|scripts|third_party|tests|benchmarks|megablocks)/[\w{},./]+", page.read_text())
    for word in words:
        for path in _brace_expansion(word.rstrip(".,/")):
            if not path.startswith("third_party/") or path.endswith((".sh", ".txt")):
                assert (ROOT / path).exists(), path
    assert page != GUIDES[0] or words


def test_tree_names_every_folder() -> None:
    tree = README.split("## The tree")[1].split("\n## ")[0]
    for folder in (ROOT / "megablocks").iterdir():
        if (folder / "__init__.py").is_file():
            assert f"      {folder.name}/ " in tree, folder.name
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {line.split("/")[0] for line in tracked.splitlines() if "/" in line and line[0] != "."}:
        assert f"    {name}/ " in tree, name
    for line in tree.splitlines():
        name = re.match(r"      (\w+)/ ", line)
        if name:
            assert (ROOT / "megablocks" / name[1] / "__init__.py").is_file(), name[1]


def test_no_emoji_in_text_files() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        assert not re.search("[\U0001f000-\U0001ffff\u2600-\u27bf]", page.read_text()), page
