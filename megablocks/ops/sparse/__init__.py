"""Block-sparse matrices and their products."""

from .matrix import Blocks, Matrix, Topology, from_coordinates, max_block_rows, topology
from .mlp import sparse_mlp
from .products import dds, dsd, sdd

__all__ = [
    "Blocks",
    "Matrix",
    "Topology",
    "dds",
    "dsd",
    "from_coordinates",
    "max_block_rows",
    "sdd",
    "sparse_mlp",
    "topology",
]
