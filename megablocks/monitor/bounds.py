"""The least time for each part of a training step: by its FLOPs and by the bytes that it must move.

A bound counts the work that a part cannot avoid unless it is fused with another: each product once, and each input read
and each output written once per pass. The work of a step is spread evenly over the GPUs of a run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megablocks.config import ConfigError
from megablocks.monitor.flops import GPTShape, forward_flops_per_token, peak_bandwidth, peak_flops

MAIN_GRADIENT_BYTES = 8
"""A weight's float32 main gradient, read and written by the product that adds to it."""


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The input of the bounds. The driver writes it next to a trace, as run.json.

    tokens: of one step, over all ranks. parameters: on the profiled rank, including expert_parameters. model_shards:
    tensor- times pipeline-parallel size. optimizer_shards: ranks that share the optimizer's state of a parameter;
    expert_optimizer_shards: the same for a parameter of an expert, None for the same number. dropout: after attention
    and MLP. tokens_per_second: after the profile, median over the log intervals.
    """

    shape: GPTShape
    tokens: int
    micro_batches: int
    parameters: int
    expert_parameters: int
    device: str
    world_size: int = 1
    model_shards: int = 1
    optimizer_shards: int = 1
    expert_optimizer_shards: int | None = None
    element_bytes: int = 2
    dropout: bool = False
    rotary: bool = False
    qk_norms: bool = False
    peak_memory_bytes: int | None = None
    tokens_per_second: float | None = None

    @classmethod
    def of(cls, args: Any, *, world_size: int, **given: Any) -> RunSizes:
        """The sizes in Megatron's arguments; `given`: those that the arguments do not contain."""
        stages, sharded = args.pipeline_model_parallel_size, args.use_distributed_optimizer
        shards = args.tensor_model_parallel_size * stages
        expert_shards = args.expert_model_parallel_size * args.expert_tensor_parallel_size * stages
        return cls(
            tokens=args.global_batch_size * args.seq_length,
            world_size=world_size,
            model_shards=shards,
            optimizer_shards=world_size // shards if sharded else 1,
            expert_optimizer_shards=world_size // expert_shards if sharded else 1,
            dropout=args.hidden_dropout > 0,
            rotary=args.position_embedding_type == "rope",
            **given,
        )

    @classmethod
    def read(cls, path: Path) -> RunSizes:
        """Read the sizes from a run.json. Raises ConfigError, which names the file and the required fields."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "shape": GPTShape(**values["shape"])})
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ConfigError(f"{path}: must be a run.json of the driver, with {names} ({error})") from None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @property
    def local_tokens(self) -> float:
        """Tokens of a step per GPU, if the GPUs share all work of the step evenly."""
        return self.tokens / self.world_size

    def flops(self, *parts: str) -> float:
        """FLOPs of a step on one GPU, forward and backward, for these parts of `forward_flops_per_token`."""
        forward = forward_flops_per_token(self.shape)
        return 3 * self.local_tokens * sum(forward[part] for part in parts)

    def activations(self, elements: float) -> float:
        """Bytes of a step on one GPU, if this number of elements is moved per token."""
        return self.local_tokens * elements * self.element_bytes

    def weights(self, parameters: float) -> float:
        """Bytes of a step for matrices: each micro-batch reads them for y and for dx, and adds their gradient."""
        return self.micro_batches * parameters * (2 * self.element_bytes + MAIN_GRADIENT_BYTES)

    def matrices(self, *parts: str) -> float:
        """Parameters on one GPU of the matrices of these parts. A token is multiplied by each of them once."""
        forward = forward_flops_per_token(self.shape)
        return sum(forward[part] for part in parts) / 2 / self.model_shards


class Work(NamedTuple):
    """FLOPs and bytes of a step on one GPU."""

    flops: float
    bytes: float


def _experts(run: RunSizes) -> Work:
    s = run.shape
    width = s.moe_ffn_hidden_size * s.up_products
    # A pair's rows. H: forward reads x, writes y; backward reads dy twice and x, writes dx. Width of the up product:
    # forward writes and reads it; backward reads it, writes its gradient, reads that twice.
    rows = 6 * s.top_k * (s.hidden_size + width)
    moved = run.weights(run.expert_parameters) + run.activations(s.num_moe_layers * rows)
    return Work(run.flops("experts"), moved)


def _routing(run: RunSizes) -> Work:
    s = run.shape
    # H: x is read forward and for the gradient of the weight, dx is written; then it is added to the experts' dx. E in
    # float32, which is two elements: the logits are written, read forward and backward; their gradient is written and
    # read twice.
    moved = s.num_moe_layers * (6 * s.hidden_size + 6 * 2 * s.num_experts)
    return Work(run.flops("router"), run.weights(run.matrices("router")) + run.activations(moved))


def _attention(run: RunSizes) -> Work:
    s = run.shape
    # There are 2 products in forward and 5 in backward (scores are computed again); the model's FLOPs count 2 and 4.
    # Forward reads q, k, v and writes o; backward reads q, k, v, o, do and writes dq, dk, dv.
    moved = s.num_layers * 6 * (s.query_width + s.key_width)
    return Work(run.flops("attention") * 3.5 / 3, run.activations(moved))


def _products(run: RunSizes) -> Work:
    s = run.shape
    # The inputs and outputs of each product. y, dx and dw move them once each: three times.
    attention = s.num_layers * 2 * (s.hidden_size + s.query_width + s.key_width)
    mlp = (s.num_layers - s.num_moe_layers) * (2 * s.hidden_size + (s.up_products + 1) * s.ffn_hidden_size)
    shared = s.num_moe_layers * (2 * s.hidden_size + (s.up_products + 1) * s.shared_expert_hidden_size)
    shared = shared if s.shared_expert_hidden_size else 0
    parts = ("attention_projections", "mlp", "shared_experts", "prediction")
    moved = run.weights(run.matrices(*parts)) + run.activations(3 * (attention + mlp + shared))
    return Work(run.flops(*parts), moved)


def _norms(run: RunSizes) -> Work:
    s = run.shape
    # Two residuals a layer, each with the norm of its sum. Forward reads the branch and the residual, writes the sum
    # and its norm; backward reads both gradients and the sum, writes that of the sum and, with dropout, of the branch.
    moved = 2 * s.num_layers * (8 + run.dropout) * s.hidden_size
    # The first norm, and those of q and k. Forward reads x, writes y; backward reads x, dy, writes dx.
    moved += 5 * (s.hidden_size + run.qk_norms * s.num_layers * (s.query_width + s.key_width))
    return Work(0, run.activations(moved))


def _embedding_and_loss(run: RunSizes) -> Work:
    # Logits need not be kept. H: forward writes the embedding's output and reads the last layer's; backward reads the
    # gradient of the first, reads the second again for dw, and writes the gradient of the second.
    moved = run.weights(run.matrices("logits")) + run.activations(5 * run.shape.hidden_size)
    return Work(run.flops("logits"), moved)


def _elementwise(run: RunSizes) -> Work:
    s = run.shape
    # Activations of dense layers. Forward reads the up product, writes; backward reads both and writes one.
    moved = (s.num_layers - s.num_moe_layers) * s.ffn_hidden_size * (3 * s.up_products + 2)
    # Rotary embedding reads and writes q and k, forward and backward.
    moved += run.rotary * s.num_layers * 4 * (s.query_width + s.key_width)
    return Work(0, run.activations(moved))


def _optimizer(run: RunSizes) -> Work:
    # A parameter: gradient, two moments and the master weight are read, 4 bytes each; the last three are written, and
    # the weight itself unless it is the master weight.
    bytes_each = 28 + (run.element_bytes if run.element_bytes < 4 else 0)
    of_experts = run.optimizer_shards if run.expert_optimizer_shards is None else run.expert_optimizer_shards
    dense = run.parameters - run.expert_parameters
    return Work(0, bytes_each * (dense / run.optimizer_shards + run.expert_parameters / of_experts))


def _gradients(run: RunSizes) -> Work:
    # Zeroing writes the main gradients and the norm reads them. The products add to them, and the optimizer scales.
    return Work(0, 2 * 4 * run.parameters)


FORMULAS: dict[str, Callable[[RunSizes], Work]] = {
    "experts": _experts,
    "routing": _routing,
    "attention": _attention,
    "dense products": _products,
    "norms": _norms,
    "embedding and loss": _embedding_and_loss,
    "elementwise": _elementwise,
    "optimizer": _optimizer,
    "gradients": _gradients,
}
"""The necessary work of each part. Copies, idle time and hidden communication are not necessary."""


class Bound(NamedTuple):
    """Milliseconds of a step, by arithmetic and by bytes."""

    arithmetic: float
    bytes: float

    @property
    def least(self) -> float:
        return max(self)


def bounds(run: RunSizes) -> dict[str, Bound]:
    """The bound of each part that has work, on the run's GPU, in ms a step.

    Empty if the GPU is unknown or the run is in float32.

    Peak rates are the data sheet's, for dense 16-bit products; measured rates are lower, 790 of 989 TFLOP/s and 4.3 of
    4.8 TB/s on an H200.
    """
    flops, bandwidth = peak_flops(run.device), peak_bandwidth(run.device)
    if flops is None or bandwidth is None or run.element_bytes != 2:
        return {}
    work = {part: formula(run) for part, formula in FORMULAS.items()}
    return {part: Bound(1e3 * w.flops / flops, 1e3 * w.bytes / bandwidth) for part, w in work.items() if any(w)}
