"""Registration with transformers, and what an environment without it, or with an old one, is told."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megablocks.hf

ROOT = Path(__file__).parents[2]


def test_L4_the_import_loads_no_transformers() -> None:
    code = "import megablocks.hf, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/")


def test_L3_an_old_or_missing_transformers_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megablocks.hf, "version", lambda _: "4.57.1")
    with pytest.raises(ImportError, match=r"^transformers 4\.57\.1 is installed, .* pip install .*>=5\.17'$"):
        megablocks.hf.register()

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(megablocks.hf, "version", missing)
    with pytest.raises(ImportError, match=r"^transformers is not installed, .* pip install .*>=5\.17'$"):
        megablocks.hf.register()


def test_the_extra_asks_for_the_oldest_version() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("hf", "dev"):
        (pin,) = (r for r in map(Requirement, extras[extra]) if r.name == "transformers")
        assert str(pin.specifier) == f">={megablocks.hf.OLDEST}"


def test_a_second_registration_changes_nothing() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)
    others = {name: moe.ALL_EXPERTS_FUNCTIONS[name] for name in ("grouped_mm", "batched_mm")}
    for _ in range(2):
        megablocks.hf.register()
        from megablocks.hf.experts import experts_forward

        assert moe.ALL_EXPERTS_FUNCTIONS[megablocks.hf.NAME] is experts_forward
    assert {name: moe.ALL_EXPERTS_FUNCTIONS[name] for name in others} == others
