"""A peer of expert_parallel.py: LigerCute, liger-cute-kernels 0.8.5, one persistent kernel a pass with NVSHMEM inside.

Its two ops take x, the experts and weights of the tokens' choices and the three weights of SwiGLU; sort, exchange,
products and sums are theirs. What it asks for:

- Weights (E', I, H) for gate and up, and (E', H, I) for down: our w2 transposed. The choices' weights are bfloat16.
- A forward pass whose backward pass does not come keeps its buffers until `moe_pop_fwd`, which `step` calls.
- The largest tokens, H, E and K of all cases are named before the first call.
- The NVSHMEM of its wheel (3.6.5 for CUDA 12) in place of torch's, which has the same file name: LD_PRELOAD.

docs/repeating_measurements.md has the installation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from expert_parallel import Case, step_of
from expert_parallel_peers import Peer as _Peer
from expert_parallel_peers import attempt
from torch import Tensor, nn

from megablocks.moe.router import make_router

NAME = "LigerCute"
ARMS = ("symmetric, eager", f"{NAME}, eager", f"{NAME}, captured", "symmetric, captured")


class Layer(nn.Module):
    """A dMoE layer with copies of the weights of `layer`. moe_fused: their op."""

    def __init__(self, layer: Any, moe_fused: Any) -> None:
        super().__init__()
        config, experts = layer.config, layer.experts
        self.moe_fused, self.sizes = moe_fused, (config.num_experts, config.top_k)
        self.router = make_router(config, device=experts.w1.device, dtype=experts.w1.dtype)
        self.router.load_state_dict(layer.router.state_dict())
        w1, v1, w2 = (
            w.detach().view(-1, config.ffn_hidden_size, config.hidden_size).clone()
            for w in (experts.w1, experts.v1, experts.w2)
        )
        self.gate, self.up = nn.Parameter(w1), nn.Parameter(v1)
        self.down = nn.Parameter(w2.transpose(1, 2).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        expert, weight = (t.view(x.shape[0], -1) for t in (routing.expert.int(), routing.weight.to(x.dtype)))
        return self.moe_fused(x, expert, weight, self.gate, self.up, self.down, *self.sizes)

    def poison(self) -> None:
        """Nothing: its buffers are its own."""

    def gradients(self) -> dict[str, Tensor]:
        """By our names, in our layouts; the experts' divided by the ranks."""
        of_experts = {"w1": self.gate.grad, "v1": self.up.grad, "w2": self.down.grad.transpose(1, 2)}
        got = {name: grad.flatten(0, 1) / dist.get_world_size() for name, grad in of_experts.items()}
        return got | {"router": self.router.layer.weight.grad}


class Peer(_Peer):
    NAME, OURS = NAME, "symmetric"

    def __init__(self, cases: Sequence[Case], factor: float) -> None:
        """factor: not used, its buffers have room for every load."""
        self.moe_fused, self.problem = attempt(lambda: self._configure([case for case in cases if not case.alone]))
        self.announce("configured")

    def _configure(self, cases: Sequence[Case]) -> Any:
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(16 * 2**30))  # where its heap cannot grow
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # the ranks are on one host
        import liger_cute_kernels
        from liger_kernel.ops.cute.ops.moe import moe_fused

        tokens, hidden, _, experts, top_k, _ = (max(values) for values in zip(*cases, strict=True))
        liger_cute_kernels.configure(
            moe=liger_cute_kernels.MoEConfig(tokens, hidden, experts, top_k, 1, dist.get_world_size())
        )
        return moe_fused

    def layer(self, ours: Any, case: Case, x: Tensor) -> Layer:
        return Layer(ours, self.moe_fused)

    def step(self, layer: Layer, x: Tensor, dy: Tensor, backward: bool) -> Tensor:
        from liger_cute_kernels import tvm_ffi

        y = step_of(layer, x, dy, backward)
        if not backward:
            tvm_ffi.moe_pop_fwd(tvm_ffi.team_world())
        return y
