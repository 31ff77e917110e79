"""The documentation site: pages, messages and names on it are true, and the built site has no dead link."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from megablocks.moe.groups import shard_of
from megablocks.tool.commands import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOOLS = "material", "mkdocs", "mkdocstrings_handlers"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"(?m)^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert len(listed) == len(set(listed))
    assert {path.name for path in DOCS.glob("*.md")} <= set(listed), "name it in mkdocs.yml and docs/index.md"


def test_every_name_of_the_api_exists() -> None:
    names = re.findall(r"(?m)^::: (\S+)$", (DOCS / "api.md").read_text())
    assert len(names) > 25
    for name in names:
        if name == "megablocks.hf" or not hasattr(
            importlib.import_module(name.rpartition(".")[0]), name.split(".")[-1]
        ):
            assert find_spec(name), name


def test_every_name_of_the_package_in_a_text_exists() -> None:
    """`megablocks.a.b` in a docstring, comment or page is a module, or stands in the module before it."""
    texts = [*(ROOT / "megablocks").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    texts += [*DOCS.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    names = {name for path in texts for name in re.findall(r"`(megablocks(?:\.\w+)+)", path.read_text())}
    assert len(names) > 30
    for name in names:
        file, last = ROOT / (name.replace(".", "/") + ".py"), name.rpartition(".")[2]
        if not file.exists() and not file.with_suffix("").is_dir():
            module = file.parent.with_suffix(".py")
            source = module if module.exists() else file.parent / "__init__.py"
            assert source.exists() and re.search(rf"\b{last}\b", source.read_text()), name


def test_the_messages_of_the_troubleshooting_are_those_of_the_code() -> None:
    """Each part of a message, between the places where values stand, is in the source."""
    source = "".join(path.read_text() for path in sorted((ROOT / "megablocks").rglob("*.py")))
    whole = re.sub(r'"\s*\n\s*(?:\+ )?f?"', "", source)  # a message of several literals
    rows = re.findall(r"(?m)^\| `([^`]+)` \| ", (DOCS / "troubleshooting.md").read_text())
    assert len(rows) > 30
    for message in rows:
        for part in message.split("…"):
            assert part.strip() in whole, message


def test_the_message_of_experts_that_the_ranks_cannot_share_is_in_the_troubleshooting() -> None:
    rows = re.findall(r"(?m)^\| `([^`]+)` \| ", (DOCS / "troubleshooting.md").read_text())
    with pytest.raises(ValueError) as caught:
        shard_of(0, 3, 8)  # what a layer of 8 experts asks on 3 ranks
    assert any(row in str(caught.value) for row in rows), caught.value


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("I want to see it train", "bash exp/smoke/dmoe.sh"),
        ("I have a Hugging Face model", 'experts_implementation="megablocks"'),
        ("I want to convert a checkpoint", "python -m megablocks convert "),
        ("I want the fastest implementation for my shape", "python -m megablocks bench "),
        ("I got an error", "(troubleshooting.md)"),
    ],
)
def test_a_new_users_task_takes_at_most_three_commands_from_the_first_page(task: str, answer: str) -> None:
    sections = re.split(r"(?m)^## ", (DOCS / "index.md").read_text())
    (section,) = (one for one in sections if one.startswith(f"{task}\n"))
    assert answer in section
    commands = re.findall(r"(?m)^    (\S.*)$", section.split("```")[0])
    assert len(commands) + 1 <= 3  # with `pip install`, which stands above
    for name in re.findall(r"python -m megablocks (\w+)", section):
        assert name in COMMANDS


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]


@pytest.mark.parametrize(
    "page", [path for path in sorted(DOCS.glob("*.md")) if "```" in path.read_text()], ids=lambda path: path.stem
)
def test_no_snippet_is_wider_than_the_page(page: Path) -> None:
    for snippet in re.findall(r"(?ms)^```\w.*?\n(.*?)^```", page.read_text()):
        assert all(len(line) <= 88 for line in snippet.splitlines()), snippet


@pytest.mark.skipif(any(find_spec(tool) is None for tool in TOOLS), reason="needs the extra docs")
def test_the_built_site_has_no_dead_link_and_no_raw_markdown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    pages = {path: _Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert {tmp_path / path.with_suffix(".html").name for path in DOCS.glob("*.md")} <= set(pages)
    dead = []
    for path, page in pages.items():
        assert "```" not in path.read_text(), f"{path.name}: a snippet is not rendered"
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", link) or target.startswith("/") and path.name == "404.html":
                continue
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].ids):
                dead.append((path.name, link))
    assert not dead
