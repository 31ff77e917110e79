"""What an environment without torchtitan, or with another release of it, is told."""

import sys

import pytest


def test_L3_a_missing_torchtitan_is_one_line_with_the_version(monkeypatch):
    monkeypatch.delitem(sys.modules, "megablocks.torchtitan", raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan.config.override", None)
    with pytest.raises(ImportError, match=r"^megablocks.torchtitan needs torchtitan 0.3 and what it imports: .+$"):
        import megablocks.torchtitan  # noqa: F401
