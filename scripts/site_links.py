"""A hook of MkDocs: pages of the repository outside docs/ become part of the site, at the paths that they have there.

The pages link each other by relative paths, as GitHub wants. On the site docs/ is the root, so `../README.md` on a page
of docs/ is `README.md` here, and `../../docs/tool.md` on a page of benchmarks/notes is `../../tool.md`. What a page
links to outside docs/, a picture, a result or a source file, is copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)|(?<=src=\")(?!\w+:)([^\"]+)")
FENCE = re.compile(r"(?m)^(```\w+) .*$")
"""The start of a snippet, with the word that tells the tests how to run it. MkDocs knows a language only."""
HOME = "README.md"


def place_of(file: Path) -> str:
    """Where a file of the repository lies on the site. README.md would be the site's front page, so it moves down."""
    path = file.relative_to(ROOT).as_posix()
    return "repository/README.md" if path == HOME else path.removeprefix("docs/")


def targets(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    found = [(page.parent / (one or two)).resolve() for one, two in LINK.findall(page.read_text("utf-8"))]
    return [path for path in found if path.is_relative_to(ROOT)]


def linked_from(pages: list[Path]) -> set[Path]:
    """The pages, and every file that can be reached from them by links."""
    seen, waiting = set(pages), list(pages)
    while waiting:
        for path in targets(waiting.pop()):
            if path not in seen and path.is_file():
                seen.add(path)
                waiting += [path] if path.suffix == ".md" else []
    return seen


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
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
