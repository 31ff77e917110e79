"""The package's metadata, its pins, the import rules and the image: each checked against what is really there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _pins() -> dict[str, SpecifierSet]:
    """The intersection of everything said about each distribution, anywhere in pyproject.toml."""
    pins: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    extras = [pins for name, pins in EXTRAS.items() if name != "docs"]  # scripts/site.sh gives it its own environment
    for text in [*PROJECT["dependencies"], *(pin for extra in extras for pin in extra)]:
        pin = Requirement(text)
        if pin.name != PROJECT["name"]:
            pins[canonicalize_name(pin.name)] &= pin.specifier
    return pins


def test_old_extras_are_kept() -> None:
    assert {"quant", "gg", "all", "megatron", "hf", "dev", "bench"} <= set(EXTRAS)


def test_pins_do_not_contradict_each_other_or_what_runs_these_tests() -> None:
    for name, specifier in _pins().items():
        assert specifier.contains(metadata.version(name), prereleases=True), f"{name}: {specifier}"


def test_constraints_name_every_package_and_lie_within_the_pins() -> None:
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    constraints = {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines[2:])}
    pins = _pins()
    assert set(constraints) == set(pins)
    for name, specifier in constraints.items():
        (exact,) = specifier
        assert exact.operator == "==" and pins[name].contains(exact.version), f"{name}{specifier}"


def test_pins_of_megatron_core_and_ours_agree() -> None:
    pins = _pins()
    for text in metadata.requires("megatron-core") or []:
        theirs = Requirement(text)
        if theirs.marker and not theirs.marker.evaluate({"extra": ""}):
            continue
        found = metadata.version(theirs.name)
        assert theirs.specifier.contains(found, prereleases=True), text
        assert pins[canonicalize_name(theirs.name)].contains(found, prereleases=True), text


def test_all_is_every_extra_for_users() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == {"megatron", "hf", "bench"}


def test_build_needs_neither_torch_nor_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "megablocks", source / "megablocks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The backend runs with a torch that cannot be imported and compilers that fail.
    (tmp_path / "poison").mkdir()
    for name in ("torch", "triton", "numpy"):
        (tmp_path / "poison" / f"{name}.py").write_text("raise ImportError('imported at build time')\n")
    build = (
        "import sys; out = sys.argv[1]; from setuptools import build_meta; "
        "assert build_meta.get_requires_for_build_wheel() == []; build_meta.build_wheel(out)"
    )
    no_compiler = {"PATH": "/usr/bin:/bin", "CC": "/bin/false", "CXX": "/bin/false"}
    environment = {**no_compiler, "PYTHONPATH": str(tmp_path / "poison")}
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    target = tmp_path / "site"
    shutil.unpack_archive(wheel, target, "zip")
    assert (target / "megablocks" / "py.typed").is_file()
    assert sorted(p.name for p in target.iterdir() if p.suffix != ".dist-info") == ["megablocks"]
    built = {p.relative_to(target) for p in target.glob("megablocks/**/*.py")}
    assert built == {p.relative_to(ROOT) for p in ROOT.glob("megablocks/**/*.py")}
    (info,) = metadata.distributions(path=[str(target)])
    assert info.version == re.search(r'__version__ = "(.+)"', (ROOT / "megablocks/__init__.py").read_text()).group(1)
    assert "torch>=2.8" in (info.requires or [])
    assert info.metadata["Requires-Python"] == ">=3.10"


def test_the_citation_names_this_version() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "megablocks/__init__.py").read_text()).group(1)
    assert re.search(r"(?m)^version: (.+)$", (ROOT / "CITATION.cff").read_text()).group(1) == version


def test_the_release_check_covers_the_pins() -> None:
    """Its plan: the oldest Python and torch of pyproject.toml, what it runs exists, and nothing is done yet."""
    command = ["bash", str(ROOT / "scripts/release_check.sh")]
    plan = subprocess.run(command, env={"PATH": os.environ["PATH"], "DRY_RUN": "1"}, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr
    (torch,) = (pin for pin in map(Requirement, PROJECT["dependencies"]) if pin.name == "torch")
    (oldest,) = torch.specifier
    lines = plan.stdout.splitlines()
    assert len(lines) == 6 and sum(f"'torch=={oldest.version}.*'" in line for line in lines) == 2
    assert lines[2].startswith("python" + PROJECT["requires-python"].removeprefix(">="))
    for path in re.findall(r"\b(?:tests|scripts)/\S+\.py", plan.stdout):
        assert (ROOT / path).is_file(), path


BREACHES = {
    "ops": "import megablocks.config",
    "config.py": "import megablocks.ops.library",
    "moe": "import megablocks.layers",
    "layers": "import megablocks.megatron",
    "monitor": "import megablocks.ops",
    "checkpoint": "import megablocks.moe",
    "data": "import megablocks.layers",
    "testing": "import megatron.core",
    "megatron": "import megablocks.tool",
    "hf": "import megablocks.megatron",
    "torchtitan": "import megablocks.hf",
    "moe/remote": "import transformers",
    "hf/remote": "import torchtitan",
    "new_folder": "",
}


@pytest.mark.parametrize("folder", BREACHES)
def test_import_rules_turn_red_when_broken(folder: str, tmp_path: Path) -> None:
    """A skeleton with every folder of the house passes; with one forbidden import it fails."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "megablocks"
    house = "ops moe layers checkpoint monitor data megatron hf torchtitan testing tool"
    for name in ("", *house.split()):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    (package / "ops" / "activation_table.py").touch()
    (package / "ops" / "library.py").touch()
    (package / "config.py").write_text("import megablocks.ops.activation_table\n")
    (package / "kinds.py").touch()
    (package / "megatron" / "specs.py").write_text("import megatron.core\nimport megablocks.layers\n")
    (package / "hf" / "__init__.py").write_text("import transformers\n")
    (package / "torchtitan" / "__init__.py").write_text("import torchtitan.config\nimport megablocks.moe\n")
    (package / "hf" / "experts.py").write_text("import transformers\nimport megablocks.moe\nimport megablocks.ops\n")
    (package / "layers" / "dmoe.py").write_text("import megablocks.moe\nimport megablocks.ops\n")
    lint = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    if folder == "ops":
        assert subprocess.run(lint, cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    file = package / folder if folder.endswith(".py") else package / folder / "breach.py"
    file.parent.mkdir(exist_ok=True)
    (file.parent / "__init__.py").touch()
    file.write_text(BREACHES[folder] + "\n")
    done = subprocess.run(lint, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout[-1500:]


def _copied() -> list[str]:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]


def test_image_copies_what_exists_and_what_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert _copied()
    for source in _copied():
        assert (ROOT / source).exists(), source
        assert source in kept, f"{source} is left out by .dockerignore"


def test_image_base_is_an_argument_with_a_pinned_tag() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+:(?!latest)\S+$", text, re.M)
    assert re.search(r"^FROM \$\{BASE\}$", text, re.M)


def test_third_party_is_pinned_by_commit_and_not_vendored(tmp_path: Path) -> None:
    pins = [line.split() for line in (ROOT / "third_party/pins.txt").read_text().splitlines() if line[0] != "#"]
    assert {name for name, *_ in pins} == {"Megatron-LM", "Tutel", "SonicMoE", "QuACK", "ScatterMoE"}
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for _, _, commit, _ in pins)
    tracked = subprocess.run(["git", "ls-files", "third_party"], cwd=ROOT, capture_output=True, text=True).stdout
    assert set(tracked.split()) <= {"third_party/pins.txt", "third_party/fetch.sh"}


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, Path, str]:
    """A third_party folder whose one pin is a local repository's first of two commits."""
    repository, folder = tmp_path / "upstream", tmp_path / "third_party"

    def git(*command: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *command], cwd=repository, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    repository.mkdir()
    git("init", "-q")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    (repository / "file").write_text("pinned\n")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    (repository / "file").write_text("later\n")
    git("commit", "-qam", "two")
    folder.mkdir()
    shutil.copy(ROOT / "third_party/fetch.sh", folder)
    (folder / "pins.txt").write_text(f"# comment\nThing {repository} {commit} one\n")
    return folder, repository, commit


def test_third_party_fetch_checks_out_the_pin_and_refuses_edits(upstream: tuple[Path, Path, str]) -> None:
    folder, _, commit = upstream
    fetch = ["bash", str(folder / "fetch.sh")]
    done = subprocess.run(fetch, capture_output=True, text=True)
    assert done.returncode == 0 and commit in done.stdout, done.stderr
    assert (folder / "Thing/file").read_text() == "pinned\n"
    assert subprocess.run(fetch, capture_output=True).returncode == 0
    (folder / "Thing/file").write_text("edited\n")
    edited = subprocess.run(fetch, capture_output=True, text=True)
    assert edited.returncode == 1 and "was edited" in edited.stderr and edited.stderr.count("\n") == 1
    shutil.rmtree(folder / "Thing")
    (folder / "Thing").mkdir()
    empty = subprocess.run(fetch, capture_output=True, text=True)
    assert empty.returncode == 1 and "Thing is at no commit or was edited" in empty.stderr
    assert empty.stderr.count("\n") == 1
    unknown = subprocess.run([*fetch, "Nope"], capture_output=True, text=True)
    assert unknown.returncode == 1 and "Nope is not in pins.txt, which has: Thing" in unknown.stderr
