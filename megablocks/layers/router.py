"""The router's losses under the names of megablocks 0.10; the router itself is in `megablocks.routers`."""

from __future__ import annotations

from megablocks.layers.losses import batched_router_zloss, clear_router_zloss

__all__ = ["batched_router_zloss", "clear_router_zloss"]
