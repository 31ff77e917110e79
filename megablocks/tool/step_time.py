"""Estimate the time of a training step, part by part: compute, memory traffic, communication and waiting.

The time of a part is its FLOPs at PRODUCTS_RATE of the peak, plus its bytes at the peak bandwidth (`monitor.bounds`),
times a measured factor. docs/tool.md says which run set which number, and how far the plan is from all other runs.
"""

from __future__ import annotations

from typing import NamedTuple

from megablocks.monitor.bounds import RunSizes, bounds
from megablocks.monitor.flops import mfu, of_device, peak_bandwidth
from megablocks.tool.memory import parameters, rows
from megablocks.tool.model import HOST_GPUS, Model

PRODUCTS_RATE = 0.8
"""Share of the peak that large products reach: 790 of 989 TFLOP/s on an H200. Twelve measured layers of experts take
0.92 to 0.99 times the sum of their FLOPs at this rate and their bytes (benchmarks/results/h200/peers_paper.json)."""
TIMES = {
    "experts": 1.03,
    "routing": 1.15,
    "dense products": 0.88,
    "norms": 1.39,
    "embedding and loss": 1.18,
    "elementwise": 1.46,
    "optimizer": 1.19,
    "gradients": 1.06,
}
"""Measured time over the time of FLOPs and bytes. A factor is the mean of two profiles, dmoe_small.json and
dmoe_fine.json in results/h200/profiles, and each of the two is within 6 % of it. Exceptions: routing and CHOICE_BYTES,
and gradients and COPIES, come from both profiles together; norms, without dropout, and elementwise are from
dmoe_fine.json."""
ATTENTION, EXPONENTIAL_FLOPS, ATTENTION_DROPOUT_FLOPS = 1.82, 256, 1284
"""1. Attention's measured time over the time of its products and exponentials at the peak, from dmoe_fine.json.
2. FLOPs that take as long as one exponential: an SM of an H100 or H200 computes 4,096 FLOPs or 16 exponentials a clock.
3. FLOPs that take as long as the dropout of one attention weight, in forward and again in backward. Set so that all
three together reproduce the time in dmoe_small.json, a model that also has shorter sequences."""
DROPOUT_BYTES = 1.4
"""Bytes that take as long as one random number of the dropout after attention and MLP, and the bit that is kept of it.
From dmoe_small.json."""
CHOICE_BYTES = 3.4
"""Bytes that take as long as one comparison of the routing kernel, which compares every expert for each of a token's
choices. From both profiles."""
COPIES = 12.3
"""Passes over the hidden states of all layers, by copies and by kernels that fill or add up gradients. From both
profiles."""
IDLE_MS = 2.1
"""Milliseconds of a step in which the GPU is idle, because the host waited for it. From dmoe_small.json."""
HOST_STEP_MS, HOST_LAYER_MS = 9.4, 5.9
"""Milliseconds that the host needs for a step, and for each layer and micro-batch of it, forward and backward. A GPU
that needs less time waits. From two steps on one H100: 56.8 ms for 8 layers and one micro-batch, 578.7 for 12 layers
and 8 micro-batches."""
RANKS_MS = 15.0
"""Milliseconds of a step in which ranks wait for one another and for the host's work on collectives. From the steps of
dMoE-Small on one H200 and on two, 162.9 and 167.1 ms. More GPUs were not measured."""
IMPL_TIMES = {"fused": 1.0, "grouped": 1.07, "sparse": 1.24, "scatter": 1.86}
"""The experts' time over that of "fused": geometric mean over the three shapes of README.md."""
LOSS_PASSES = 3
"""Passes over the logits by the fused loss's kernels other than the products. Source: benchmarks/notes/loss.md."""
PLAIN_LOSS_PASSES = 26
"""The same for Megatron's loss, which computes in float32. Counted in passes over bfloat16 logits."""
HOST_GB, HOST_US = 330.0, 18.0
"""Bandwidth in one direction between GPUs of a host, in GB/s, and latency in µs. Least-squares fit to the exchanges of
benchmarks/results/h200/expert_parallel.json."""
NETWORK_GB, NETWORK_US = 40.0, 36.0
"""The same between hosts. Assumed: one adapter of 400 Gbit/s for each GPU at 80 %, and twice the latency."""
ERROR_BAR, ERROR_BAR_LAYOUT = 0.20, 0.40
"""Shares of the time. The first is for one or two H200s or H100s: all steps that this code was measured with are within
it. The second is a guess, for everything else."""
MEASURED_GPUS = {"H200 NVL": False, "H200": True, "H100 80GB HBM3": True}
"""Whether a GPU was measured, by words of the device name, as in `monitor.flops.GPUS`."""


_ONCE = ("optimizer", "gradients", "communication: gradients over data-parallel ranks", "waiting for other ranks")
"""Parts that occur once per step, not once per micro-batch."""


class StepTime(NamedTuple):
    """Times of a step. parts: milliseconds. mfu: None for an unknown GPU.

    error_bar: share of the time. None if the host limits the speed and there are layers without experts: HOST_LAYER_MS
    was measured for layers with experts, so the error of such a time is unknown.
    """

    parts: dict[str, float]
    tokens_per_second: float
    mfu: float | None
    error_bar: float | None

    @property
    def milliseconds(self) -> float:
        return sum(self.parts.values())


def run_sizes(m: Model) -> RunSizes:
    """Return the sizes from which `monitor.bounds` computes the bounds."""
    p = parameters(m)
    return RunSizes.of(
        m,
        world_size=m.gpus,
        shape=m.shape,
        micro_batches=m.micro_batches,
        parameters=p.per_gpu,
        expert_parameters=p.experts_per_gpu,
        device=m.gpu,
        element_bytes=m.element_bytes,
        qk_norms=m.qk_layernorm,
    )


def _communication(m: Model) -> dict[str, float]:
    """Return milliseconds per step. No communication overlaps with other work."""
    p, n, e = parameters(m), rows(m), m.element_bytes
    tp, ep, dp, pp = (m.tensor_model_parallel_size, m.expert_model_parallel_size, m.data_parallel_size,
                      m.pipeline_model_parallel_size)  # fmt: skip

    def latency(ranks: int, near: int) -> float:
        return 0.0 if ranks == 1 else (HOST_US if ranks <= near else NETWORK_US) / 1e3

    def reduced(sent: float, ranks: int, apart: int) -> float:
        """Return milliseconds of a reduce-scatter or an all-gather over rings of `ranks` ranks.

        sent: bytes of the whole tensor. apart: distance between neighbors of a ring, in global ranks. A ring enters
        and leaves each host once. A host has as many rings as the group has ranks on it.
        """
        near = max(1, HOST_GPUS // apart)
        rate = HOST_GB if ranks <= near else min(HOST_GB, near * NETWORK_GB)
        return 1e3 * sent * (ranks - 1) / ranks / (rate * 1e9) + latency(ranks, near)

    def exchanged(sent: float, ranks: int, apart: int) -> float:
        """Return milliseconds of an all-to-all. sent: bytes of each rank, in equal parts for all ranks and itself.

        apart: as in `reduced`. Links within a host and links between hosts work at the same time.
        """
        near = min(ranks, max(1, HOST_GPUS // apart))
        inside, outside = (near - 1) / HOST_GB, (ranks - near) / NETWORK_GB
        return 1e3 * sent / ranks * max(inside, outside) / 1e9 + latency(ranks, near)

    hidden = n.group * m.hidden_size * e  # of a micro-batch
    layers, moe = m.num_layers / pp, m.shape.num_moe_layers / pp
    inner = m.tensor_model_parallel_size * m.context_parallel_size
    # Summed in float32. The distributed optimizer sums each rank's part only, and sends the new weights.
    each = 4 + e if m.use_distributed_optimizer else 2 * 4
    # A pass exchanges rows twice per layer and sums hidden states twice; a sum is a reduce-scatter and an all-gather.
    # Full recomputation repeats the forward pass with its communication.
    passes = m.micro_batches * (3 if m.recompute_granularity == "full" else 2)
    gradients = reduced(each * p.dense_per_gpu, dp, inner)
    gradients += reduced(each * p.experts_per_gpu, m.expert_data_parallel_size, ep * m.etp) if m.num_experts else 0.0
    return {
        "gradients over data-parallel ranks": gradients,
        "all-to-all of the experts": passes * moe * 2 * exchanged(n.sent * m.hidden_size * e, ep, m.etp),
        "tensor parallelism": passes * layers * 4 * reduced(hidden, tp, 1),
    }


def _of_one_gpu(m: Model) -> dict[str, float]:
    """Return milliseconds per step, by part, of a GPU's compute and memory traffic. Empty if bounds are unknown."""
    least, bandwidth, s, n = bounds(run_sizes(m)), peak_bandwidth(m.gpu), m.shape, rows(m)
    if not least or bandwidth is None:
        return {}

    def moved(num_bytes: float) -> float:
        return 1e3 * num_bytes / bandwidth

    stages, tokens = m.pipeline_model_parallel_size, m.tokens / m.gpus
    hidden = tokens * s.num_layers * m.hidden_size * m.element_bytes
    logits = n.group * m.vocab_size * m.element_bytes / m.tensor_model_parallel_size
    passes = LOSS_PASSES if m.fused_loss else PLAIN_LOSS_PASSES
    more = {
        "routing": moved(tokens * s.num_moe_layers * s.num_experts * s.top_k * CHOICE_BYTES),
        "embedding and loss": moved(m.micro_batches * logits * passes / stages),
        "norms": moved(2 * hidden / m.element_bytes * DROPOUT_BYTES) if m.hidden_dropout else 0.0,
        # Data parallelism scales all gradients before it adds them up.
        "gradients": least["gradients"].bytes if m.data_parallel_size > 1 else 0.0,
    }
    parts = {}
    for part, bound in least.items():
        if part != "attention":
            parts[part] = TIMES[part] * (bound.arithmetic / PRODUCTS_RATE + bound.bytes + more.get(part, 0.0))
    # A score needs 14 FLOPs for each feature of a head. Forward and backward both compute its exponential and dropout.
    beside = ATTENTION * EXPONENTIAL_FLOPS + (ATTENTION_DROPOUT_FLOPS if m.attention_dropout else 0)
    parts["attention"] = least["attention"].arithmetic * (ATTENTION + 2 * beside / 14 / s.head_dim)
    parts["copies"] = moved(COPIES * hidden)
    # Keys and values are copied to every head of a group, and their gradients added up.
    if s.key_width != s.query_width:
        parts["copies"] += moved(4 * (s.query_width + s.key_width) * tokens * s.num_layers * m.element_bytes)
    if "experts" in parts:
        parts["experts"] *= IMPL_TIMES[m.impl]
        if m.recompute_activation and m.impl == "fused":  # backward computes the up-projection again
            parts["experts"] *= 1 + s.up_products / (s.up_products + 1) / 3
    if m.fused_loss:  # backward recomputes the logits that were not kept: a fourth product
        again = max(0.0, 1 - m.kept_logits / logits) / 3 * least["embedding and loss"].arithmetic / PRODUCTS_RATE
        parts["embedding and loss"] += TIMES["embedding and loss"] * again
    if m.recompute_granularity == "full":
        for part in {"experts", "routing", "attention", "dense products", "norms", "elementwise"} & parts.keys():
            parts[part] *= 4 / 3
    return parts


def step_time(m: Model, skew: float = 1.0) -> StepTime | None:
    """Return the time of a step, or None for unknown bounds: a GPU that `monitor.flops` does not know, or float32.

    skew: rows of the fullest expert-parallel rank over the mean of all ranks.
    """
    parts = _of_one_gpu(m)
    if not parts:
        return None
    communication = {f"communication: {name}": ms for name, ms in _communication(m).items() if ms}
    exchange = communication.get("communication: all-to-all of the experts", 0.0)
    stages = m.pipeline_model_parallel_size
    launches = 0 if m.captured else 4 / 3 if m.recompute_granularity == "full" else 1
    host = HOST_STEP_MS + launches * HOST_LAYER_MS * m.num_layers / stages * m.micro_batches
    waits = host - sum(parts.values()) - exchange
    parts["idle"] = max(IDLE_MS, waits)
    parts |= communication
    if m.gpus > 1:
        parts["waiting for other ranks"] = RANKS_MS
    if skew > 1:
        parts["waiting for the fullest rank"] = (skew - 1) * (parts.get("experts", 0.0) + exchange)
    if stages > 1:
        repeated = sum(ms for name, ms in parts.items() if name not in _ONCE)
        # The other stages wait for the last one, which has the same number of layers, and the loss.
        last = parts["embedding and loss"] * (stages - 1)
        parts["waiting for the last stage"] = last
        parts["communication: pipeline bubble"] = (repeated + last) * (stages - 1) / m.micro_batches
    rate = m.tokens / sum(parts.values()) * 1e3
    measured = m.measured_layout and of_device(MEASURED_GPUS, m.gpu) and m.recompute_granularity is None
    bar = ERROR_BAR if measured else ERROR_BAR_LAYOUT
    unknown = waits > IDLE_MS and m.shape.num_moe_layers < m.num_layers
    return StepTime(parts, rate, mfu(rate, m.shape, m.gpu, m.gpus), None if unknown else bar)
