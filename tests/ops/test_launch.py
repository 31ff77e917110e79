"""`quick`: a launch finds the compiled kernel that Triton would, and another one wherever Triton would compile anew."""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from gpu.family import launches

import megablocks.ops
from megablocks.ops import launch
from megablocks.ops.launch import QuickLaunch, cdiv, next_power_of_2

GPU = torch.cuda.is_available()


class Kernel:
    """Stands for a JIT function k(x_ptr, y_ptr, n, m, scale, BLOCK, NAME), n not specialised; counts its look-ups."""

    def __init__(self):
        self.fn = SimpleNamespace(__name__="k", __module__="kernels")
        plain = {"do_not_specialize": False, "has_default": False}
        runtime = [SimpleNamespace(name=n, is_constexpr=False, **plain) for n in "xynms"]
        runtime[2].do_not_specialize = True
        static = [SimpleNamespace(name=n, is_constexpr=True, **plain) for n in ("BLOCK", "NAME")]
        self.params = runtime + static
        self.looked_up, self.launched, self.compiles = 0, [], True

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.looked_up += 1
            return Compiled(self, self.looked_up) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args, stream: self.kernel.launched.append((self.number, grid, args))


@pytest.fixture
def kernel(monkeypatch):
    _pretend_a_gpu(monkeypatch)
    return Kernel()


def _pretend_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


ROOM = torch.zeros(64)
X, Y = ROOM[:16], ROOM[16:32]
OPTIONS = {"num_warps": 4, "NAME": "a", "BLOCK": 64}


@dataclass
class Descriptor:
    block_shape: list[int]
    layout: object
    base: torch.Tensor = X


def test_N9_the_second_launch_goes_to_the_compiled_kernel(kernel):
    quick = QuickLaunch(kernel)
    quick[(7,)](X, None, 100, 48, 0.5, **OPTIONS)
    quick[8, 9](Y, None, 3, 32, 1.5, **OPTIONS)  # other pointers, another n, another multiple of 16
    assert kernel.looked_up == 1
    assert kernel.launched == [(1, (8, 9, 1), (Y.data_ptr(), None, 3, 32, 1.5, 64, "a"))]


def test_the_tests_see_the_second_launch_too(kernel):
    quick = QuickLaunch(kernel)
    for _ in range(2):
        with launches() as launched:
            quick[(7,)](X, None, 100, 48, 0.5, **OPTIONS)
        assert launched == {"kernels.k"}
    assert kernel.looked_up == 1 and len(kernel.launched) == 1


LAYOUTS = object(), object()
# Arguments that compile differently, one after the other launched twice. The first two: 1 is not True, nor 16 one.
DIFFERENT = {
    "size 1": (X, Y, 5, 1, 1.0),
    "size 16": (X, Y, 5, 16, 1.0),
    "size 3": (X, Y, 5, 3, 1.0),
    "misaligned": (ROOM[1:], Y, 5, 3, 1.0),
    "the other misaligned": (X, ROOM[1:], 5, 3, 1.0),
    "dtype": (X.double(), Y, 5, 3, 1.0),
    "none": (None, Y, 5, 3, 1.0),
    "none for a size": (X, Y, None, 3, 1.0),
    "none for the next size": (X, Y, 5, None, 1.0),
    "descriptor": (Descriptor([1, 64], LAYOUTS[0]), Y, 5, 3, 1.0),
    "its box": (Descriptor([64, 1], LAYOUTS[0]), Y, 5, 3, 1.0),
    "its layout": (Descriptor([1, 64], LAYOUTS[1]), Y, 5, 3, 1.0),
    "its dtype": (Descriptor([1, 64], LAYOUTS[0], X.double()), Y, 5, 3, 1.0),
}


def test_N9_what_compiles_differently_is_kept_apart(kernel, monkeypatch):
    quick, calls = QuickLaunch(kernel), []
    calls += [(args, OPTIONS) for args in DIFFERENT.values()]
    args = DIFFERENT["size 3"]
    calls += [(args, OPTIONS | changed) for changed in ({"NAME": "b"}, {"BLOCK": 32}, {"num_warps": 8})]
    calls.append((args, {"num_warps": 64, "NAME": "a", "BLOCK": 4}))
    calls += [(args, OPTIONS | {"BLOCK": one}) for one in (1, True, 1.0)]
    for args, options in calls + calls:
        quick[(1,)](*args, **options)
    assert kernel.looked_up == len(calls)
    assert [number for number, *_ in kernel.launched] == list(range(1, len(calls) + 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    quick[(1,)](*DIFFERENT["size 3"], **OPTIONS)
    assert kernel.looked_up == len(calls) + 1


@pytest.mark.parametrize("place", ["runtime.debug", "compilation.instrumentation_mode"])
def test_N9_a_switch_of_triton_that_changes_the_compiled_form_does_so_at_the_next_launch(place, kernel, monkeypatch):
    quick, (group, name) = QuickLaunch(kernel), place.split(".")
    for value in (getattr(getattr(triton.knobs, group), name), "on"):
        monkeypatch.setattr(getattr(triton.knobs, group), name, value)
        for _ in range(2):
            quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    assert kernel.looked_up == 2


def _specialized():
    from megablocks.ops.hopper import descriptor

    sizes = (-17, -16, -1, 0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63)
    values = [*sizes, None, True, False, 0.0, 1.0, 16.0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool):
        room = torch.zeros(4096, dtype=dtype)
        values += [room, room[1:], room[16:], torch.empty(0, dtype=dtype)]
        if dtype in (torch.bfloat16, torch.float16):
            values += [descriptor(room.view(64, 64), box) for box in ([64, 64], [64, 32], [32, 64], [16, 16])]
            values.append(descriptor(room.view(1, 64, 64), [1, 64, 64]))
    return values


@pytest.mark.parametrize("specialize", [True, False])
def test_N9_equal_keys_are_equal_specializations_to_triton(specialize, monkeypatch):
    """Of every two arguments of which the second is launched as the first was, Triton's own rules say the same."""
    native, backends = pytest.importorskip("triton._C.libtriton"), pytest.importorskip("triton.backends.compiler")
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    backend = nvidia.CUDABackend(backends.GPUTarget("cuda", 90, 32))
    values, shared = _specialized(), 0
    rules = [native.native_specialize_impl(backend, v, False, specialize, True) for v in values]
    _pretend_a_gpu(monkeypatch)
    for i, first in enumerate(values):
        for j, second in enumerate(values):
            kernel = Kernel()
            kernel.params[3].do_not_specialize = not specialize
            quick = QuickLaunch(kernel)
            quick[(1,)](X, Y, 5, first, 1.0, **OPTIONS)
            quick[(1,)](X, Y, 5, second, 1.0, **OPTIONS)
            if kernel.looked_up == 1:
                assert rules[i] == rules[j], f"{first} and {second}"
                shared += i != j
    assert shared > len(values)  # and it does share


def test_a_tensor_of_the_cpu_is_left_to_triton_to_refuse(kernel, monkeypatch):
    quick = QuickLaunch(kernel)
    quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    assert kernel.looked_up == 2 and not kernel.launched


def test_a_kernel_that_is_still_compiled_elsewhere_is_not_kept(kernel, monkeypatch):
    """Within triton's AsyncCompileMode a launch returns what stands for the kernel."""
    quick = QuickLaunch(kernel)
    with monkeypatch.context() as compiling:
        compiling.setattr(Compiled, "result", None, raising=False)
        quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    for _ in range(2):
        quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    assert kernel.looked_up == 2 and len(kernel.launched) == 1


@pytest.mark.parametrize("size", [2**31, -(2**31) - 1, True])
def test_what_it_has_no_rule_for_is_left_to_triton(kernel, size):
    quick = QuickLaunch(kernel)
    for _ in range(2):
        quick[(1,)](X, Y, size, 3, 1.0, **OPTIONS)
    assert kernel.looked_up == 2 and not kernel.launched


def test_nothing_is_kept_where_nothing_was_compiled(kernel):
    quick, kernel.compiles = QuickLaunch(kernel), False
    for _ in range(2):
        quick[(1,)](X, Y, 5, 3, 1.0, **OPTIONS)
    assert kernel.looked_up == 2 and not kernel.launched


def test_kept_kernels_are_bounded(kernel, monkeypatch):
    monkeypatch.setattr("megablocks.ops.launch._MOST", 3)
    quick = QuickLaunch(kernel)
    for block in range(10):
        quick[(1,)](X, Y, 5, 3, 1.0, NAME="a", BLOCK=block)
        assert 1 <= len(quick._compiled) <= 3


def test_compile_time_parameters_come_last():
    kernel = Kernel()
    kernel.params.reverse()
    with pytest.raises(AssertionError, match="k: compile-time parameters must come last"):
        QuickLaunch(kernel)


def test_parameters_have_no_defaults():
    """What a call leaves out is not among the options that the second launch is given."""
    kernel = Kernel()
    kernel.params[-1].has_default = True
    with pytest.raises(AssertionError, match="k: parameters must have no default"):
        QuickLaunch(kernel)


def test_every_kernel_is_launched_so():
    plain = []
    for path in Path(megablocks.ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                if any("jit" in d for d in decorators) and decorators[0] != "quick":
                    plain.append(f"{path.name}: {node.name}")
    assert not plain


COUNTS = {"tokens", "num_tokens", "rows", "num_rows", "pairs", "num_pairs", "ids", "num_ids", "total", "capacity"}


def test_no_kernel_is_specialized_on_a_count_of_tokens():
    """Triton would compile anew for a count of 1 and for multiples of 16."""
    counts, specialized = 0, []
    for path in Path(megablocks.ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("_kernel"):
                jit = ast.unparse(node.decorator_list[-1])
                for a in node.args.args:
                    counts += (is_count := a.arg in COUNTS and a.annotation is None)
                    if is_count and f"'{a.arg}'" not in jit:
                        specialized.append(f"{path.name}: {node.name}({a.arg})")
    assert counts > 10 and not specialized


def test_sizes():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


@pytest.mark.gpu
def test_gpu_quick_launches_equal_the_first():
    """Misaligned pointers between aligned ones, new lengths, another dtype: each launched twice, by one kernel."""
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.activation_triton import _forward_kernel, activation_launch

    room = torch.randn(5000, device="cuda")
    wide = [(start, length, torch.float32) for start, length in ((0, 4096), (1, 4096), (0, 1), (3, 777))]
    for _ in range(2):
        for start, length, dtype in (*wide, (0, 4096, torch.bfloat16), (1, 100, torch.bfloat16)):
            x = room.to(dtype)[start : start + length]
            got = activation_launch(x, None, Activation("silu"))
            want = torch.nn.functional.silu(x.double())
            assert (got - want).norm() <= 4e-3 * want.norm()
    assert isinstance(_forward_kernel, QuickLaunch) and len(_forward_kernel._compiled) >= 5
