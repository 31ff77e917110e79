"""A hook of MkDocs: pages of the repository outside docs/ become part of the site, with their paths in the repository.

The pages link to each other by relative paths, as GitHub requires. On the site docs/ is the root, so `../README.md` on
a page of docs/ becomes `README.md`, and `../../docs/tool.md` on a page of benchmarks/notes becomes `../../tool.md`.
Files outside docs/ that a page links to, such as pictures, results and source files, are copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)|(?<=src=\")(?!\w+:)([^\"]+)")
FENCE = re.compile(r"(?m)^(```\w+) .*$")
"""The start of a snippet, with the word that tells the tests how to run it. MkDocs accepts only a language."""
HOME = "README.md"


def place_of(file: Path) -> str:
    """The place of a file of the repository on the site. README.md would be the site's front page, so it moves down."""
    path = file.relative_to(ROOT).as_posix()
    return "repository/README.md" if path == HOME else path.removeprefix("docs/")


def targets(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    found = [(page.parent / (one or two)).resolve() for one, two in LINK.findall(page.read_text("utf-8"))]
    return [path for path in found if path.is_relative_to(ROOT)]


def linked_from(pages: list[Path]) -> set[Path]:
    """The pages, and every file that links from them lead to."""
    seen, waiting = set(pages), list(pages)
    while waiting:
        for path in targets(waiting.pop()):
            if path not in seen and path.is_file():
                seen.add(path)
                waiting += [path] if path.suffix == ".md" else []
    return seen


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    extra = [ROOT / HOME, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/notes/README.md"]
    for path in sorted(linked_from([*pages, *extra])):
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, place_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links and snippets as they must be on the site."""
    source = Path(page.file.abs_src_path)
    here = Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[0]).resolve()
        if not target.is_relative_to(ROOT) or not target.is_file():
            return match[0]
        return Path(os.path.relpath(place_of(target), here)).as_posix()

    return FENCE.sub(r"\1", LINK.sub(moved, markdown))
