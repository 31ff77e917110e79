"""Runs every family of kernels once, at one small and odd size. The tests run this program under compute-sanitizer.

python tests/gpu/sanitize.py [FAMILY…]

As a program it gives persistent kernels only three programs, so that a program has more than one tile. Only then does
it reuse buffers, and only then do two consumers take turns.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the path that the tests have

from gpu import families_layers, families_ops  # noqa: F401 (they register)
from gpu.family import FAMILIES, launches, offsets_of
from megablocks.ops.fused import gradient_hopper, up_hopper
from megablocks.ops.grouped import grouped_mm_hopper, grouped_mm_hopper_dw
from megablocks.ops.sparse import products_hopper as hopper

__all__ = ["FAMILIES", "accesses", "launches", "offsets_of"]


PROGRAMS = 3


def accesses(said: str) -> list[tuple[str, str, int]]:
    """Kernel, file and line of each access that racecheck's output reports as a hazard; "", 0 if it has no line."""
    found = re.findall(r" access at (.+)\+0x[0-9a-f]+(?: in (\S+):(\d+))?(?: \[\d+ hazards?\])?$", said, re.MULTILINE)
    assert len(found) == said.count(" access at "), "an access that could not be parsed"
    return [(kernel, file, int(line or 0)) for kernel, file, line in found]


def main() -> None:
    for module in (gradient_hopper, up_hopper, grouped_mm_hopper, grouped_mm_hopper_dw, hopper):
        assert callable(module.multiprocessors)
        module.multiprocessors = lambda device: PROGRAMS
    grouped_mm_hopper_dw._LEAST = 64  # the family's longest expert is cut
    for name in sys.argv[1:] or FAMILIES:
        for t in FAMILIES[name](torch.device("cuda", 0))():
            assert not t.is_floating_point() or bool(t.isfinite().all()), f"{name}: a result is not finite"
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
