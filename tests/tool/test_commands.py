"""`python -m megablocks`: help, bad commands, and what is loaded before a command needs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megablocks.tool import commands, convert
from megablocks.tool.commands import COMMANDS, main

ROOT = Path(__file__).parents[2]
NAMES = "env, doctor, bench, plan, convert, verify"


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


def test_without_a_command_it_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and summary in text for name, summary in COMMANDS.items())
    assert main([]) == 2 and capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evn"], f"megablocks: evn: no such command, did you mean env?; one of {NAMES}"),
        (["sing"], f"megablocks: sing: no such command; one of {NAMES}"),
        (["env", "--jso"], "megablocks env: unrecognized arguments: --jso"),
        (["verify"], "megablocks verify: the following arguments are required: folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err == said + "\n"


@pytest.mark.parametrize("words", ["env", "doctor --no-speed", "bench --tokens 8 --hidden-size 16 --ffn-hidden-size 16 "
                                   "--num-experts 4 --top-k 2 --rounds 1 --only grouped"])  # fmt: skip
@pytest.mark.parametrize("name", ["MEGABLOCKS_HOPPER", "MEGABLOCKS_COMPILE_AHEAD"])
def test_a_bad_switch_is_one_line(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "off")
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"megablocks {words.split()[0]}: {name}=off: must be 0 or 1\n"


SHAPE = "--tokens 8 --hidden-size 16 --ffn-hidden-size 16 --num-experts 4 --top-k 2 --rounds 1".split()


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["bench", *SHAPE, "--out", ""], "--out"),
        (["bench", *SHAPE, "--out="], "--out"),
        (["convert", "", "there", "--to", "hf"], "FROM"),
        (["convert", "here", "", "--to", "hf"], "TO"),
        (["convert", "here", "there", "--to", "hf", "--like", ""], "--like"),
        (["verify", ""], "folder"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: list[str],
    argument: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of an unset variable in a script."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = f"megablocks {words[0]}: argument {argument}: '' is empty: must be a path; . is the current folder\n"
    assert capsys.readouterr().err == said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch", "torch is not installed: pip install torch"),
        ("torch.new", "the torch that is installed has no module torch.new; install another release"),
    ],
)
def test_a_package_that_is_missing_is_one_line(
    name: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(path: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(commands, "load", lacks)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == f"megablocks doctor: {said}\n"


def test_an_import_that_names_no_package_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(path: str) -> object:
        raise ModuleNotFoundError("what a package says itself")

    monkeypatch.setattr(commands, "load", lacks)
    with pytest.raises(ModuleNotFoundError, match="^what a package says itself$"):
        main(["doctor"])


def _shell(command: str, **environment: str) -> tuple[int, str, str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **environment}
    done = subprocess.run(["bash", "-c", command], env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_torch_says_nothing_of_a_cuda_toolkit_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    toolkit = {"CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    said = _shell("$PYTHON -m megablocks plan -- --num-layers 2", **toolkit)
    assert said == (2, "", "megablocks plan: hidden_size=None: --hidden-size is required\n")


def test_output_that_cannot_be_written_is_one_line_at_most() -> None:
    program = "$PYTHON -m megablocks"
    assert _shell(f"{program} --help >/dev/full") == (1, "", "megablocks: output: No space left on device\n")
    assert _shell(f"{program} --help >&-") == (0, "", "")
    for words in ("--help", "env"):
        assert _shell(f"({program} {words}; echo $? >&2) | true") == (0, "", "141\n")


def test_a_locale_without_its_characters_gets_their_numbers() -> None:
    code, out, problem = _shell("$PYTHON -m megablocks plan --help", LC_ALL="C", PYTHONUTF8="0")
    assert (code, problem) == (0, "") and "\\u2026" in out and "…" not in out


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load", interrupted)
    monkeypatch.setattr(sys, "argv", ["megablocks", "doctor"])
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert commands.program() == 130
    assert capsys.readouterr().err == "megablocks: interrupted\n"


def test_an_error_of_no_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's and Triton's "could not get source code", which is an OSError."""

    def mistaken(path: str) -> object:
        raise OSError("could not get source code")

    monkeypatch.setattr(commands, "load", mistaken)
    monkeypatch.setattr(sys, "argv", ["megablocks", "doctor"])
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(OSError, match="^could not get source code$"):
        commands.program()


def test_an_error_of_no_file_in_a_conversion_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*arguments: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(convert, "convert", mistaken)
    with pytest.raises(OSError, match="^could not get source code$"):
        main(["convert", "here", "there", "--to", "hf"])


def test_it_runs_as_a_module_and_loads_no_torch_before_a_command_needs_it(tmp_path: Path) -> None:
    done = _python("-X", "importtime", "-m", "megablocks")
    assert done.returncode == 2 and "doctor" in done.stdout
    assert not any(line.endswith(("| torch", "| numpy")) for line in done.stderr.splitlines())
    code = "import sys; from megablocks.tool.commands import main; code = main(['verify', sys.argv[1]]); "
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    done = _python("-c", code, str(tmp_path))
    assert done.returncode == 2 and "holds neither manifest.json nor iter_* folders" in done.stderr


PAGES = {path.name: re.sub(r"\\\n\s+", "", path.read_text()) for path in (ROOT / "docs").glob("*.md")}
EXAMPLES = {name: re.findall(r"(?m)^    python -m megablocks (.+)$", page) for name, page in PAGES.items()}
ALL = dict.fromkeys(one for found in EXAMPLES.values() for one in found if not one.startswith(("verify", "convert")))


@pytest.mark.parametrize("command", ALL)
def test_the_pages_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if " -- " in command:
        pytest.importorskip("megatron.training")
    assert main(shlex.split(command)) in (0, 1)  # a GPU in use may be slow, and a model may not fit
    assert capsys.readouterr().out


def test_the_page_shows_every_command() -> None:
    assert {one.split()[0] for one in EXAMPLES["tool.md"]} == set(COMMANDS)
