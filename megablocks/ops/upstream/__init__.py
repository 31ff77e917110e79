"""The functions of megablocks 0.10's `ops`, by its names, arguments and results, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def function_class(name: str, function: Callable[..., Any]) -> type[Any]:
    """A class `name` whose `apply` is `function`, for programs that call the autograd functions of 0.10 by class."""
    return type(name, (), {"apply": staticmethod(function)})


def as_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the behavior of a kernel launch: it builds no graph, and autocast changes no dtype."""

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return launch
