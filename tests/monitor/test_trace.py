"""Traces made by hand: who asked for a kernel, to which part it belongs, and whose time an instant is."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import megablocks
from megablocks.config import ConfigError
from megablocks.monitor.parts import PARTS, RULES, part_of
from megablocks.monitor.trace import Kernel, exclusive_times, read_step


class Trace:
    """Events of one CPU thread and of the GPU. Times are in µs."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.launches = 0

    def host(self, name: str, start: float, end: float, category: str = "cpu_op", **arguments: Any) -> Trace:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start}
        self.events.append({**event, "args": arguments})
        return self

    def range(self, name: str, start: float, end: float) -> Trace:
        return self.host(name, start, end, "user_annotation")

    def kernel(self, name: str, launched: float, start: float, end: float, category: str = "kernel") -> Trace:
        self.launches += 1
        self.host("cudaLaunchKernel", launched, launched + 0.5, "cuda_runtime", correlation=self.launches)
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": end - start}
        self.events.append({**event, "args": {"correlation": self.launches}})
        return self

    def save(self, path: Path) -> Path:
        others = [{"ph": "M", "name": "process_name"}, {"ph": "X", "name": "of no category", "ts": 0, "dur": 1}]
        text = json.dumps({"traceEvents": [*others, *self.events]}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def one_step() -> Trace:
    """1000 µs: a product forward and backward in a range, a gradient added, an update, a copy, 400 µs of idle time."""
    trace = Trace().range("ProfilerStep#3", 0, 1000)
    trace.range("part: elementwise", 5, 100).range("part: dense products", 10, 60)
    trace.host("aten::detach", 12, 13, **{"Sequence number": 4, "Fwd thread id": 0})
    trace.host("Linear", 20, 50, **{"Sequence number": 4, "Fwd thread id": 0}).host("aten::mm", 25, 45)
    trace.kernel("nvjet_hsh", 30, 100, 200)
    trace.host("aten::dropout", 70, 90).kernel("void fused_dropout<float>", 75, 200, 250)
    trace.host("autograd::engine::evaluate_function: LinearBackward", 200, 300,
               **{"Sequence number": 4, "Fwd thread id": 1})  # fmt: skip
    trace.kernel("nvjet_hsh", 210, 300, 450)
    trace.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 310, 350)
    trace.host("aten::add_", 315, 340).kernel("vectorized_elementwise_kernel", 320, 450, 500)
    trace.range("part: gradients", 500, 900).kernel("Memset (Device)", 510, 510, 560, "gpu_memset")
    trace.range("part: optimizer", 600, 800).host("aten::copy_", 610, 700).kernel("copy_kernel", 620, 700, 850)
    return trace.host("aten::copy_", 910, 940).kernel("Memcpy DtoH", 920, 930, 980, "gpu_memcpy")


def test_a_kernel_has_the_part_of_its_range_of_its_forward_op_or_of_its_op(tmp_path: Path) -> None:
    step = read_step(one_step().save(tmp_path / "trace.json.gz"))
    parts = [(part_of(kernel), kernel.start) for kernel in step.kernels]
    assert parts == [
        ("dense products", 100), ("elementwise", 200), ("dense products", 300), ("gradients", 450), ("gradients", 510),
        ("optimizer", 700), ("copies", 930),
    ]  # fmt: skip
    assert (step.start, step.end, step.count, step.on_gpu) == (0, 1000, 1, True)
    assert step.kernels[2].callers == ("autograd::engine::evaluate_function: LinearBackward", "Linear")


def test_several_steps_last_from_first_kernel_to_first_kernel(tmp_path: Path) -> None:
    trace = Trace().kernel("before the first step", 1, 2, 3)
    for i in range(3):  # the device runs 500 µs behind the host
        trace.range(f"ProfilerStep#{i}", 100 * i + 5, 100 * i + 105)
        trace.kernel("a", 100 * i + 10, 500 + 300 * i, 600 + 300 * i).kernel(
            "b", 100 * i + 20, 650 + 300 * i, 700 + 300 * i
        )
    step = read_step(trace.save(tmp_path / "trace.json"))
    assert (step.start, step.end, step.count) == (500, 1100, 2)
    assert [kernel.name for kernel in step.kernels] == ["a", "b"] * 2


def test_without_a_gpu_the_ops_count(tmp_path: Path) -> None:
    trace = Trace().range("ProfilerStep#1", 0, 100).range("part: norms", 0, 60)
    trace.host("aten::layer_norm", 10, 50).host("aten::mean", 20, 30)
    step = read_step(trace.save(tmp_path / "trace.json"))
    assert not step.on_gpu and [part_of(kernel) for kernel in step.kernels] == ["norms", "norms"]
    assert exclusive_times(step.kernels, [False, False]) == [30, 10]


def _kernels(*intervals: tuple[float, float]) -> list[Kernel]:
    return [Kernel("k", start, end, (), "") for start, end in intervals]


def test_an_instant_counts_once_and_communication_only_where_nothing_else_runs() -> None:
    kernels = _kernels((0, 10), (5, 20), (30, 40), (8, 50))
    assert exclusive_times(kernels, [False, False, False, True]) == [5, 15, 10, 20]
    assert exclusive_times(kernels, [False] * 4) == [5, 3, 10, 32]
    assert exclusive_times([], []) == []


@pytest.mark.parametrize(
    "name, callers, within, part",
    [
        ("ncclDevKernel_AllReduce", ("aten::copy_",), "gradients", "communication"),
        ("elementwise_kernel", ("aten::copy_",), "embedding and loss", "embedding and loss"),
        ("elementwise_kernel", ("aten::copy_",), "experts", "copies"),
        ("_grouped_mm_kernel", ("megablocks::fused_mlp",), "", "experts"),
        ("flash_fwd_kernel", (), "", "attention"),  # no range and no op, as in a CUDA graph
        ("nvjet_hsh_128x256", (), "", "dense products"),
        ("multi_tensor_apply_kernel", ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"), "", "optimizer"),
        ("vectorized_layer_norm_kernel", ("aten::native_layer_norm",), "", "norms"),
        ("reduce_kernel", ("aten::linalg_vector_norm",), "elementwise", "gradients"),
        # Autograd adds the gradients of a residual inside the node that takes their sum.
        ("add", ("aten::add_", "autograd::engine::evaluate_function: Linear"), "dense products", "norms"),
        ("add", ("aten::add", "autograd::engine::evaluate_function: RouterGatingLinear"), "", "routing"),
        ("add", ("aten::add_", "LayerNorm", "autograd::engine::evaluate_function: LayerNorm"), "norms", "norms"),
        ("_route_kernel", ("router",), "", "routing"),
        ("down_gradient_kernel", (), "", "experts"),
        ("_rows_kernel", ("megablocks::scattered_mm",), "experts", "experts"),
        ("_rows_kernel", ("megablocks::rows_linear",), "routing", "routing"),
        ("triton_poi_fused_add_native_dropout_0", (), "elementwise", "norms"),
        ("triton_poi_fused_add_mul_tanh_0", (), "", "elementwise"),
        ("_rope_kernel", (), "", "elementwise"),
        ("_norm_backward_kernel", ("normBackward",), "", "norms"),
        ("reduce_kernel", ("aten::sum", "add_normBackward"), "", "norms"),
        ("nvjet_hsh", ("aten::mm", "_LinearCrossEntropy"), "", "embedding and loss"),
        ("some_kernel", (), "", "other"),
    ],
)
def test_rules(name: str, callers: tuple[str, ...], within: str, part: str) -> None:
    assert part_of(Kernel(name, 0, 1, callers, within)) == part
    assert {rule.part for rule in RULES} <= set(PARTS)


def test_each_of_our_kernels_has_a_part_by_its_name_alone() -> None:
    """As in a CUDA graph, where a kernel has no op and no range."""
    experts = ("fused", "grouped", "permute", "quant", "activation_triton.py", "products_hopper.py")
    ops = Path(megablocks.__file__).parent / "ops"
    for path in sorted(ops.rglob("*.py")):
        for name in re.findall(r"\.jit[^\n]*\ndef (\w+_kernel)\(", path.read_text()):
            part = part_of(Kernel(name, 0, 1, (), ""))
            assert part != "other", f"{path}: {name}"
            if path.name != "padded_triton.py" and set(experts) & set(path.relative_to(ops).parts):
                assert part == "experts", f"{path}: {name}"


def test_L2_a_file_that_is_no_trace_is_one_line(tmp_path: Path) -> None:
    how = "record it with --profile --use-pytorch-profiler"
    damaged = gzip.compress(b"{}")[:10] + b"\xff" * 9  # a header, and what zlib cannot decompress
    for name, data in (("a.json", b"{}"), ("b.json.gz", b"no gzip"), ("c.json", b"[1, 2"), ("c.json.gz", damaged)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name}: must be a Chrome trace of torch's profiler .*{how}"):
            read_step(tmp_path / name)
    with pytest.raises(ConfigError, match="nowhere.json: must be a Chrome trace"):
        read_step(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=f"d.json: holds no ProfilerStep# range; {how}"):
        read_step(Trace().kernel("a", 1, 2, 3).save(tmp_path / "d.json"))
    with pytest.raises(ConfigError, match=f"e.json: its steps hold no kernel; {how}"):
        read_step(Trace().range("ProfilerStep#1", 0, 9).save(tmp_path / "e.json"))
