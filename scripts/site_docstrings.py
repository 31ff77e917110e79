"""A Griffe extension: the site shows docstrings as they are written, because they are plain text, not Markdown."""

from __future__ import annotations

from typing import Any

import griffe


class AsWritten(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = f"```text\n{obj.docstring.value}\n```"
