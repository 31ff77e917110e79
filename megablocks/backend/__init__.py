"""The folder of megablocks 0.10's kernels; see `kernels`."""

from megablocks.backend import kernels as kernels
