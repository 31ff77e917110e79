"""Public docstrings give shapes and dtypes of tensors, units and errors, as far as a program can tell.

A statement counts wherever a reader meets it: in the docstring of the function, its class or its module. A reference to
another docstring ("Like `f`", "those of `f`") counts for what that one says of the arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megablocks.ops import _PUBLIC as OPS

ROOT = Path(__file__).parents[1]
PAGE = re.findall(r"(?m)^::: (\S+)$", (ROOT / "docs/api.md").read_text())
LISTED = [name for name in PAGE if not (ROOT / name.replace(".", "/")).is_dir()] + [f"{m}.{n}" for n, m in OPS.items()]
"""The public names, of docs/api.md and of `megablocks.ops`."""
OF_TORCH = {"extra_repr"}
"""Methods whose docstring is that of torch's class."""
SHAPE = re.compile(r"\((?:\)|\.\.\.|…|[A-Z0-9]|sum\()|\bshape\b|\bscalar\b")
DTYPE = re.compile(r"float|bf16|fp16|int\d|dtype|bool|integer|\bi32\b|\bbits\b")
REFERENCE = re.compile(r"([Ll]ike|[Aa]s|[Aa]s in|those of) `")
MEASURED = re.compile(r"(^|_)(timeout|interval|delay|duration|deadline|memory)$")
UNIT = re.compile(r"second|\bms\b|minute|hour|byte|[KMG]iB")


class Function(NamedTuple):
    """A function or method. text: its docstring, and for `__init__` the class's. around: of its class and module."""

    name: str
    node: ast.FunctionDef
    text: str
    around: str
    helpers: dict[str, ast.FunctionDef]


def functions(source: str, module: str) -> Iterator[Function]:
    """The public functions and methods of a file. helpers: its private ones, which they may call."""
    tree = ast.parse(source)
    yield from _functions(tree.body, module, ast.get_docstring(tree) or "", {}, None)


def _functions(
    body: list[ast.stmt], named: str, around: str, helpers: dict[str, ast.FunctionDef], owner: ast.ClassDef | None
) -> Iterator[Function]:
    made = [node for node in body if isinstance(node, ast.FunctionDef)]
    helpers = helpers | {node.name: node for node in made if node.name.startswith("_")}
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            inside = f"{around}\n\n{ast.get_docstring(node) or ''}"
            yield from _functions(node.body, f"{named}.{node.name}", inside, helpers, node)
    for node in made:
        of_class = owner is not None and node.name in ("__init__", "__call__", "__post_init__")
        if node.name[0] != "_" or of_class:
            text = ast.get_docstring(node) or ""
            if owner is not None and node.name in ("__init__", "__post_init__"):
                text = f"{ast.get_docstring(owner) or ''}\n\n{text}"
            yield Function(f"{named}.{node.name}", node, text, around, helpers)


def errors(node: ast.FunctionDef, helpers: dict[str, ast.FunctionDef], seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of the exceptions that a function, or a private helper that it calls, raises."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Raise) and one.exc is not None:
            made = one.exc.func if isinstance(one.exc, ast.Call) else one.exc
            name = ast.unparse(made).rpartition(".")[2]
            found |= {name} if name[0].isupper() else set()  # not a caught one
        elif isinstance(one, ast.Call):
            name = ast.unparse(one.func).removeprefix("self.")
            if name == "refuse":
                found.add("ConfigError")
            elif name in helpers and name not in seen:
                # a helper that raises NotImplementedError is for a subclass to fill
                found |= errors(helpers[name], helpers, seen | {name}) - {"NotImplementedError"}
    return found


def tensors(node: ast.FunctionDef) -> list[str]:
    """Parameters that are tensors, of a function that returns some."""
    if node.returns is None or "Tensor" not in ast.unparse(node.returns):
        return []
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    kinds = {one.arg: ast.unparse(one.annotation) for one in given if one.annotation is not None}
    return [name for name, kind in kinds.items() if re.fullmatch(r"Tensor( \| None)?", kind)]


def missing(one: Function) -> list[str]:
    """What the docstring of a function leaves out."""
    found = []
    for name in sorted(errors(one.node, one.helpers)):
        if name not in one.text and not (name == "ConfigError" and "ValueError" in one.text):
            found.append(f"raises {name}")
    whole = f"{one.text}\n\n{one.around}"
    is_property = any(ast.unparse(how).endswith("property") for how in one.node.decorator_list)
    said_above = one.node.name in OF_TORCH or is_property and re.search(rf"\b{one.node.name}\b", one.around)
    if one.node.name[0] != "_" and not one.text and not said_above:
        found.append("no docstring")
    for given in (*one.node.args.args, *one.node.args.kwonlyargs):
        if MEASURED.search(given.arg) and not UNIT.search(whole):
            found.append(f"unit of {given.arg}")
    if REFERENCE.search(one.text):
        return found
    # a sentence, an entry of Args, or a row of a legend
    parts = re.split(r"(?<=[.;])\s+(?=[A-Z])|\n\s*\n|\n(?=\s*[\w, ]+:)|\n(?=\s*\w+\s\s+)", whole)
    for name in tensors(one.node):
        if not any(re.search(rf"\b{name}\b", part) and SHAPE.search(part) for part in parts):
            found.append(f"shape of {name}")
    if tensors(one.node) and not DTYPE.search(whole):
        found.append("dtype")
    return found


def public_files() -> list[Path]:
    files = {file for folder in ("moe", "layers", "hf") for file in (ROOT / "megablocks" / folder).glob("*.py")}
    files |= {file for name in LISTED if (file := ROOT / f"{name.rpartition('.')[0].replace('.', '/')}.py").exists()}
    return sorted(files)


@pytest.mark.parametrize("file", public_files(), ids=lambda file: str(file.relative_to(ROOT / "megablocks")))
def test_public_docstrings_are_complete(file: Path) -> None:
    """Of an op only what is listed is public; of the layers and of Hugging Face's experts all."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    silent = {}
    for one in functions(file.read_text(), module):
        is_listed = any(f"{one.name}.".startswith(f"{name}.") for name in LISTED)
        if not is_listed and module.startswith("megablocks.ops"):
            continue
        lacks = [what for what in missing(one) if is_listed or what != "dtype"]
        if lacks:
            silent[one.name] = lacks
    assert not silent


def test_measured_arguments_have_a_unit() -> None:
    silent = {}
    for file in sorted((ROOT / "megablocks").rglob("*.py")):
        for one in functions(file.read_text(), file.stem):
            lacks = [what for what in missing(one) if what.startswith("unit of")]
            if lacks:
                silent[one.name] = lacks
    assert not silent


WHOLE = '''
def _check(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError("x")

def scaled(x: Tensor, mask: Tensor | None, timeout: float) -> Tensor:
    """x (T, H) in float32 → (T, H), where mask (T,) is set, within `timeout` seconds.

    Raises:
        ValueError: x of another shape.
    """
    _check(x)
    return x
'''


@pytest.mark.parametrize(
    ("old", "new", "lacks"),
    [
        ("", "", []),
        ('    """x (T, H)', '    """Like `other`: x', []),
        ("def scaled", "def _scaled", None),
        ("ValueError: x of another shape.", "an error, if x has another shape.", ["raises ValueError"]),
        ("        raise ValueError", "        refuse", []),
        ("within `timeout` seconds", "within `timeout`", ["unit of timeout"]),
        ("in float32 ", "", ["dtype"]),
        ("where mask (T,) is set", "where mask is set", []),  # in one sentence with a shape: no program can tell
        ("x (T, H) in float32 → (T, H), where mask (T,) is set", "float32 x", ["shape of mask"]),
    ],
)  # fmt: skip
def test_what_is_left_out_is_found(old: str, new: str, lacks: list[str] | None) -> None:
    found = [missing(one) for one in functions(WHOLE.replace(old, new, 1), "m")]
    assert found == ([] if lacks is None else [lacks])


def test_a_public_function_without_a_docstring_is_found() -> None:
    (one,) = functions("def plain(n: int) -> int:\n    return n", "m")
    assert missing(one) == ["no docstring"]
