"""What sdd does to its result before it is written: bias and activation forward, the activation's slope backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Epilogue:
    """
    kind: "" nothing; "activate": add bias, write that and `act`, its activation; "slope": multiply by act'(pre).
    name, exact: the activation, one of `activation.UNARY`, and for gelu whether erf's form.
    bias: (N,) or None. pre: (n, B, B), read by "slope". act: (n, B, B), written by "activate".
    """

    kind: str = ""
    name: str = "gelu"
    exact: bool = False
    bias: Tensor | None = None
    pre: Tensor | None = None
    act: Tensor | None = None


NONE = Epilogue()
