"""Every family of kernels once, at one small and odd size: what compute-sanitizer watches and the tests here repeat.

python tests/gpu/sanitize.py [FAMILY…]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # as the tests see it

from gpu import families_layers, families_ops  # noqa: F401 (they register)
from gpu.family import FAMILIES, launches, offsets_of

__all__ = ["FAMILIES", "launches", "offsets_of"]


def main() -> None:
    for name in sys.argv[1:] or FAMILIES:
        for t in FAMILIES[name](torch.device("cuda", 0))():
            assert not t.is_floating_point() or bool(t.isfinite().all()), f"{name}: a result is not finite"
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
