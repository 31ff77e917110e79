"""Experts over several ranks: our dispatcher as `ep_implementation="megablocks"`, an interface of transformers 5.23.

    x (T, H) ─ slice over TP ─▶ our dispatcher: all-to-all, experts, all-to-all ─▶ y ─ gather over TP ─▶ (T, H)

Each rank holds a contiguous block of the experts. Ranks of one tensor-parallel group hold the same tokens, so each rank
computes its slice of them. Gradients of the experts are sums over the ranks' tokens, as with transformers' own
exchange; transformers divides both in the same way. The only host synchronization is one exchange of row counts per
layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from megablocks.hf.experts import compute_rows, routing_of
from megablocks.moe.dispatchers import make_dispatcher


class ExpertParallel(EPImplementation):
    """The experts of one module over the ranks of `ep_mesh`; built and called by transformers.

    Args:
        experts: the module with this rank's experts, `num_experts` of them.
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that hold the same tokens.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.num_experts = self.num_local_experts * ep_mesh.size()
        self.dispatcher = make_dispatcher(ep_mesh.get_group(), self.num_experts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, H), top_k_index (T, K) ids over all ranks, top_k_weights (T, K) → (T, H)."""
        x, ids, weight = (self._own_slice(t) for t in (hidden_states, top_k_index, top_k_weights))
        y = self.dispatcher.run(x, routing_of(ids, weight, self.num_experts), partial(compute_rows, self.experts))
        return self._gathered(y, hidden_states)

    def _own_slice(self, t: Tensor) -> Tensor:
        """t (T, ...), equal on the ranks of the tensor-parallel group → this rank's rows of t."""
        if self.tp_mesh.size() == 1:
            return t
        whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _gathered(self, y: Tensor, like: Tensor) -> Tensor:
        """This rank's rows y → the rows of all ranks, in the shape of `like`: the reverse of `_own_slice`."""
        if self.tp_mesh.size() == 1:
            return y
        shape, stride = like.shape, (like.shape[1], 1)
        sliced = DTensor.from_local(y.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride)
        return sliced.full_tensor()
