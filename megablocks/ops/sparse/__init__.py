"""Block-sparse matrices and their products."""

from .matrix import Matrix, from_coordinates
from .mlp import sparse_mlp
from .products import dds, dds_ref, dsd, dsd_ref, sdd, sdd_ref
from .topology import Topology, max_block_rows, topology

__all__ = [
    "Matrix",
    "Topology",
    "dds",
    "dds_ref",
    "dsd",
    "dsd_ref",
    "from_coordinates",
    "max_block_rows",
    "sdd",
    "sdd_ref",
    "sparse_mlp",
    "topology",
]
