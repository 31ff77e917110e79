"""The time of a training step: each part's bound (`monitor.bounds`) times how far the part was from it when measured.

On several GPUs the formulas of communication come on top. Nothing was measured there: their error bar is a guess.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megablocks.monitor.bounds import RunSizes, bounds
from megablocks.monitor.flops import mfu, peak_bandwidth, peak_flops
from megablocks.tool.memory import parameters, rows
from megablocks.tool.model import Model

TIMES_BOUND = {
    "experts": 2.20,
    "routing": 1.56,
    "attention": 5.43,
    "dense products": 1.36,
    "norms": 1.69,
    "embedding and loss": 1.36,
    "elementwise": 2.67,
    "optimizer": 1.19,
    "gradients": 1.39,
}
"""Measured time over bound. Source: the profile in benchmarks/notes/training_step.md, dMoE-Small with micro-batches of
128 on an H200. That profile has another loss, so the fused loss counts as a dense product, and its passes below."""
EXPERTS_TIMES_BYTES = 1.48
"""The same for experts that memory limits, whose factor above is that of their arithmetic. Source: README.md's layer
of Medium, forward and backward: 1.15 ms, for 3.7 GB."""
IMPL_TIMES = {"fused": 1.0, "grouped": 1.07, "sparse": 1.24, "scatter": 1.86}
"""The experts' time beside "fused": geometric mean of README.md's three shapes."""
IDLE_MS = 11.0
"""Of a step, mostly the host's work around the optimizer. With the next it is what is left of six measured steps."""
IDLE_LAYER_MS = 0.4
"""Of each layer in each micro-batch: gaps between launches, and copies."""
LOSS_PASSES = 3
"""Passes over the logits by kernels other than the products. Source: benchmarks/notes/loss.md."""
PLAIN_LOSS_PASSES = 26
"""Megatron's loss in float32, counted in the bytes of bfloat16. Source: the same."""
COPY_RATE = 0.9
"""Of the peak bandwidth that a kernel that only moves bytes reaches: 4.3 of 4.8 TB/s on an H200."""
LINK_GB, NETWORK_GB, HOST_GPUS = 450.0, 50.0, 8
"""GB/s in one direction: a GPU's NVLink of an H100 or H200 host, and one 400 Gbit/s adapter a GPU. Data sheets."""
LINK_SHARE = 0.6
"""Of these rates that NCCL reaches. Assumed."""
ERROR_BAR, ERROR_BAR_LAYOUT = 0.20, 0.40
"""Of the time on one H200, which the six measured steps hold, and elsewhere, which is a guess."""


_ONCE = ("optimizer", "gradients", "communication: gradients over data-parallel ranks")
"""Parts that a step has once, however many micro-batches it has."""


class Conditions(NamedTuple):
    """What else decides a step's time, beside the model and its layout.

    host_gb, network_gb: GB/s in one direction that a GPU's collectives reach inside a host and between hosts.
    host_us, network_us: microseconds before their first byte. host_gpus: GPUs of a host.
    experts_tflops: rate of the experts' kernels, forward and backward; None: from the steps measured on an H200.
    skew: rows of the fullest expert-parallel rank over the mean. row_a_rank: the all-to-all sends a token once to each
    rank that holds one of its experts, instead of once to each expert.
    """

    host_gb: float = LINK_GB * LINK_SHARE
    network_gb: float = NETWORK_GB * LINK_SHARE
    host_us: float = 0.0
    network_us: float = 0.0
    host_gpus: int = HOST_GPUS
    experts_tflops: float | None = None
    skew: float = 1.0
    row_a_rank: bool = False


class StepTime(NamedTuple):
    """parts: milliseconds of a step. mfu: None for an unknown GPU."""

    parts: dict[str, float]
    tokens_per_second: float
    mfu: float | None
    error_bar: float

    @property
    def milliseconds(self) -> float:
        return sum(self.parts.values())


def run_sizes(m: Model) -> RunSizes:
    """The sizes from which the bounds are computed."""
    p = parameters(m)
    return RunSizes(
        shape=m.shape,
        tokens=m.tokens,
        micro_batches=m.micro_batches,
        parameters=p.per_gpu,
        expert_parameters=p.experts_per_gpu,
        device=m.gpu,
        world_size=m.gpus,
        model_shards=m.tensor_model_parallel_size * m.pipeline_model_parallel_size,
        optimizer_shards=m.data_parallel_size if m.use_distributed_optimizer else 1,
        element_bytes=m.element_bytes,
        rotary=m.position_embedding_type == "rope",
    )


def _communication(m: Model, on: Conditions) -> dict[str, float]:
    """Milliseconds a step, nothing of it hidden behind other work."""
    p, n, e = parameters(m), rows(m), m.element_bytes
    tp, ep, dp, pp = (m.tensor_model_parallel_size, m.expert_model_parallel_size, m.data_parallel_size,
                      m.pipeline_model_parallel_size)  # fmt: skip

    def latency(ranks: int, near: int) -> float:
        return 0.0 if ranks == 1 else (on.host_us if ranks <= near else on.network_us) / 1e3

    def reduced(sent: float, ranks: int, apart: int) -> float:
        """For bytes that each of `ranks` ranks sends around rings. apart: distance of two neighbors in global ranks.

        A ring enters and leaves a host once, and a host has as many rings as the group has ranks on it.
        """
        near = max(1, on.host_gpus // apart)
        rate = on.host_gb if ranks <= near else min(on.host_gb, near * on.network_gb)
        return 1e3 * sent * (ranks - 1) / ranks / (rate * 1e9) + latency(ranks, near)

    def exchanged(sent: float, ranks: int, apart: int) -> float:
        """For bytes that each rank sends in equal parts to all, itself included; both kinds of links work at once."""
        near = min(ranks, max(1, on.host_gpus // apart))
        inside, outside = (near - 1) / on.host_gb, (ranks - near) / on.network_gb
        return 1e3 * sent / ranks * max(inside, outside) / 1e9 + latency(ranks, near)

    hidden = n.group * m.hidden_size * e  # of a micro-batch
    layers, moe = m.num_layers / pp, m.shape.num_moe_layers / pp
    pairs = n.expert * m.hidden_size * e
    if on.row_a_rank and m.num_experts:  # ranks that a token's distinct experts lie on, by chance, over its experts
        missed = math.comb(m.num_experts - m.num_experts // ep, m.moe_router_topk)
        pairs *= ep * (1 - missed / math.comb(m.num_experts, m.moe_router_topk)) / m.moe_router_topk
    inner = m.tensor_model_parallel_size * m.context_parallel_size
    # Summed in float32. The distributed optimizer sums each rank's part only, and sends the new weights.
    each = 4 + e if m.use_distributed_optimizer else 2 * 4
    gradients = reduced(each * p.dense_per_gpu, dp, inner)
    gradients += reduced(each * p.experts_per_gpu, m.expert_data_parallel_size, ep * m.etp) if m.num_experts else 0.0
    return {
        "gradients over data-parallel ranks": gradients,
        "all-to-all of the experts": m.micro_batches * moe * 4 * exchanged(pairs, ep, m.etp),
        "tensor parallelism": m.micro_batches * layers * 8 * reduced(hidden, tp, 1),
    }


def step_time(m: Model, on: Conditions = Conditions()) -> StepTime | None:  # noqa: B008 - immutable
    """None where the bounds are unknown: another GPU than those of `monitor.flops`, or float32."""
    run = run_sizes(m)
    least, bandwidth = bounds(run), peak_bandwidth(m.gpu)
    if not least or bandwidth is None:
        return None
    parts = {part: TIMES_BOUND[part] * bound.least for part, bound in least.items()}
    if "experts" in parts:
        experts = least["experts"]
        peak = peak_flops(m.gpu)
        times = TIMES_BOUND["experts"] if on.experts_tflops is None or peak is None else peak / on.experts_tflops / 1e12
        parts["experts"] = max(times * experts.arithmetic, EXPERTS_TIMES_BYTES * experts.bytes)
        parts["experts"] *= IMPL_TIMES[m.impl]
        if m.recompute_activation and m.impl == "fused":  # backward computes the up-projection again
            gated = 2 if m.swiglu else 1
            parts["experts"] *= 1 + gated / (gated + 1) / 3
    n = rows(m)
    logits = n.group * m.vocab_size * m.element_bytes / m.tensor_model_parallel_size
    again = max(0.0, 1 - m.kept_logits / logits) if m.fused_loss else 0.0
    passes = LOSS_PASSES if m.fused_loss else PLAIN_LOSS_PASSES
    moved = m.micro_batches * logits * passes / m.pipeline_model_parallel_size
    parts["embedding and loss"] *= 1 + again / 3  # a fourth product for the logits that were not kept
    parts["embedding and loss"] += 1e3 * moved / (COPY_RATE * bandwidth)
    if m.recompute_granularity == "full":
        for part in ("experts", "routing", "attention", "dense products", "norms", "elementwise"):
            parts[part] = parts.get(part, 0.0) * 4 / 3
    parts["idle and copies"] = IDLE_MS + IDLE_LAYER_MS * m.num_layers / m.pipeline_model_parallel_size * m.micro_batches
    parts |= {f"communication: {name}": ms for name, ms in _communication(m, on).items() if ms}
    if on.skew > 1:
        busy = parts.get("experts", 0.0) + parts.get("communication: all-to-all of the experts", 0.0)
        parts["waiting for the fullest rank"] = (on.skew - 1) * busy
    stages = m.pipeline_model_parallel_size
    if stages > 1:
        repeated = sum(ms for name, ms in parts.items() if name not in _ONCE)
        # The others wait for the last stage too, which has the loss and as many layers as they.
        last = parts["embedding and loss"] * (stages - 1)
        parts["waiting for the last stage"] = last
        parts["communication: pipeline bubble"] = (repeated + last) * (stages - 1) / m.micro_batches
    rate = m.tokens / sum(parts.values()) * 1e3
    measured = m.gpus == 1 and "H200" in m.gpu and m.recompute_granularity is None
    return StepTime(parts, rate, mfu(rate, m.shape, m.gpu, m.gpus), ERROR_BAR if measured else ERROR_BAR_LAYOUT)
