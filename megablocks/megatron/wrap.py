"""Wrap functions of Megatron and torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_installed: set[tuple[Any, str, Callable[..., Any]]] = set()


def wrap(owner: Any, **wrappers: Callable[..., Any]) -> None:
    """Replace functions of a module or class by wrappers, which get the original as their first argument.

    A wrapper that is installed already is not installed again.
    """
    for name, wrapper in wrappers.items():
        if (owner, name, wrapper) in _installed:
            continue
        _installed.add((owner, name, wrapper))
        wrapped = _in_front(wrapper, getattr(owner, name))
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _in_front(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `wrapper` with `original` as its first argument."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return call
