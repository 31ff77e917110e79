"""Every family of kernels once, at one small and odd size: what compute-sanitizer watches and the tests here repeat.

python tests/gpu/sanitize.py [FAMILY…]

Run so, the persistent kernels have three programs, or none would have a second tile: it is from there on that buffers
are used again and that two consumers take turns.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # as the tests see it

from gpu import families_layers, families_ops  # noqa: F401 (they register)
from gpu.family import FAMILIES, launches, offsets_of
from megablocks.ops.fused import gradient_hopper, up_hopper
from megablocks.ops.grouped import grouped_mm_hopper
from megablocks.ops.sparse import hopper

__all__ = ["FAMILIES", "accesses", "launches", "offsets_of"]


PROGRAMS = 3


def accesses(said: str) -> list[tuple[str, str, int]]:
    """Kernel, file and line (where it has none "", 0) of each access in a hazard that racecheck's output reports."""
    found = re.findall(r" access at (.+)\+0x[0-9a-f]+(?: in (\S+):(\d+))?(?: \[\d+ hazards?\])?$", said, re.MULTILINE)
    assert len(found) == said.count(" access at "), "an access that is not understood"
    return [(kernel, file, int(line or 0)) for kernel, file, line in found]


def main() -> None:
    for module in (gradient_hopper, up_hopper, grouped_mm_hopper, hopper):
        assert callable(module.multiprocessors)
        module.multiprocessors = lambda device: PROGRAMS
    for name in sys.argv[1:] or FAMILIES:
        for t in FAMILIES[name](torch.device("cuda", 0))():
            assert not t.is_floating_point() or bool(t.isfinite().all()), f"{name}: a result is not finite"
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
