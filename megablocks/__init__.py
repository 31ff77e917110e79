"""Dropless mixture-of-experts training: layers, kernels and a Megatron plug-in.

Importing this package loads no torch, triton or megatron; each public name is imported on first use.
"""

from __future__ import annotations

from megablocks.kinds import on_first_use

__version__ = "1.0.0.dev0"

_PUBLIC = {
    "MoEConfig": "megablocks.config",
    "ConfigError": "megablocks.config",
    "Arguments": "megablocks.layers.arguments",
    "dMoE": "megablocks.layers.dmoe",
    "MoE": "megablocks.layers.moe",
    "MLP": "megablocks.layers.mlp",
    "ParallelDroplessMLP": "megablocks.layers.dmoe",
    "ParallelMLP": "megablocks.layers.moe",
    "SparseGLU": "megablocks.layers.glu",
    "SparseMLP": "megablocks.layers.mlp",
    "batched_load_balancing_loss": "megablocks.layers.losses",
    "batched_router_zloss": "megablocks.layers.losses",
    "clear_load_balancing_loss": "megablocks.layers.losses",
    "clear_router_zloss": "megablocks.layers.losses",
    "get_load_balancing_loss": "megablocks.layers.losses",
}

# 0.10 imported these with the package, so its users use megablocks.layers.moe without importing it.
_SUBMODULES = ("backend", "grouped_gemm_util", "layers", "ops")

__all__ = ["__version__", *_PUBLIC]
__getattr__, __dir__ = on_first_use("megablocks", _PUBLIC, _SUBMODULES)
