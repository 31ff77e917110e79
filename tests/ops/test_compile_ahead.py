"""Compiling ahead: launches that compile beside each other and do not run, and a module's first calls."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
import triton

from megablocks import MoEConfig
from megablocks.moe import dMoE
from megablocks.ops import launch

PROGRAM = """
import threading
import torch
from triton import knobs
from megablocks.ops.launch import compile_ahead, is_compiling_ahead
from megablocks.testing.compile_only import compiling_for

made = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: made.append((src.name, threading.current_thread().name))

def ints(n):
    return torch.ones(n, dtype=torch.int32)

def bookkeeping(tokens):
    from megablocks.ops.routing.dispatch_triton import dispatch_launch
    return dispatch_launch(ints(tokens), ints(tokens), tokens, 8)

ahead = []

def step():
    assert is_compiling_ahead()
    ahead.extend(bookkeeping(512))

with compiling_for(90):
    compile_ahead(step)
    assert not is_compiling_ahead()
    first = list(made)
    bookkeeping(512)
    bookkeeping(700)
assert sorted(name for name, _ in first) == ["_count_kernel", "_place_kernel", "_scan_kernel"], first
assert not any(thread == "MainThread" for _, thread in first), first
assert made == first, "compiled again"
assert all(not t.any() for t in ahead), "what no kernel has written is not 0"
print("compiled ahead")
"""


def test_launches_compile_in_threads_and_are_not_compiled_again(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout == "compiled ahead\n", done.stderr[-2000:]


@pytest.fixture
def on_cpu(monkeypatch):
    """`compile_first_call` takes tensors of the CPU; on a GPU launches would compile within its step."""
    fork = torch.random.fork_rng
    monkeypatch.setattr(launch, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(launch, "_done", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))


class Part(torch.nn.Module):
    """A module with one parameter and one buffer."""

    def __init__(self, config="a", size=2):
        super().__init__()
        self.config = config
        self.w = torch.nn.Parameter(torch.ones(size))
        self.register_buffer("count", torch.zeros(()))


X = torch.zeros(3)


def _ran(module, call="sorted", x=X):
    """How often the step runs ahead of this call."""
    steps = []

    def step(x):
        steps.append(1)
        return []

    launch.compile_first_call(module, call, step, x)
    return len(steps)


def test_once_a_kind_of_call_and_once_for_modules_alike(on_cpu):
    first = Part()
    assert _ran(first) == 1 and _ran(first) == 0
    assert _ran(Part()) == 0, "a twin compiles again"
    assert _ran(Part("b")) == 1 and _ran(Part(size=3)) == 1
    assert _ran(first, "dispatched") == 1 and _ran(first, x=X.double()) == 1
    with torch.no_grad():
        assert _ran(first) == 1


def test_what_fails_is_left_to_the_call_itself(on_cpu):
    def fails(x):
        raise torch.OutOfMemoryError("full")

    module = Part()
    launch.compile_first_call(module, "sorted", fails, X)
    assert _ran(module) == 0 and isinstance(module.w, torch.nn.Parameter)


def test_sharded_parameters_are_left_alone(on_cpu):
    class Sharded(torch.nn.Parameter):
        pass

    module = Part()
    module.w = Sharded(torch.zeros(2))
    assert _ran(module) == 0


def test_nobody_around_the_call_sees_anything_of_it(on_cpu):
    """A checkpoint, gradients, marks of Megatron, the generator, buffers and the caller's own graph."""
    module, packed, ran = Part(), [], []
    module.w.main_grad, module.w.grad_added_to_main_grad = torch.ones(2), False
    x = torch.ones(2, requires_grad=True) * 2

    def step(x):
        assert x.is_leaf and x.requires_grad and module.w.main_grad is not None
        module.count += 1
        module.w.grad_added_to_main_grad = True
        y = (module.w * x) * torch.rand(2)
        y.register_hook(ran.append)
        return [y.exp(), torch.zeros(3)]

    before, w = torch.get_rng_state(), module.w
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        launch.compile_first_call(module, "sorted", step, x)
    assert len(ran) == 1 and not ran[0].any(), "backward ran with zeros"
    assert packed == [] and torch.equal(torch.get_rng_state(), before) and module.count == 0
    assert module.w is w and w.grad is None and not w.grad_added_to_main_grad


@pytest.fixture
def asynchronous():
    """The active AsyncCompileMode, which Triton keeps for this thread's context."""
    return pytest.importorskip("triton.runtime._async_compile").active_mode


def test_nothing_stays_on_after_a_step_that_was_broken_off(asynchronous, monkeypatch):
    ran = []

    def step():
        ran.append(asynchronous.get() is not None and launch.is_compiling_ahead() and not torch.empty(4096).any())

    def interrupted(*_):  # as by Ctrl-C while Triton waits for what still compiles
        raise KeyboardInterrupt

    monkeypatch.setattr(triton.AsyncCompileMode, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.compile_ahead(step)
    assert ran == [True] and asynchronous.get() is None and not launch.is_compiling_ahead()
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture
def nan_for_empty():
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def test_backward_gets_zeros_for_empty_too(asynchronous, nan_for_empty):
    seen = []

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(torch.empty(4096))
            return dy

    x = torch.ones(3, requires_grad=True)
    assert torch.empty(4096).isnan().all()
    with torch.autograd.set_multithreading_enabled(False):
        launch.compile_ahead(lambda: launch._backward_ahead([Op.apply(x), torch.ones(2)]))
    assert len(seen) == 1 and not seen[0].any() and not x.grad.any()


CONFIGS = [
    dict(),
    dict(mlp_impl="reference", activation="swiglu", mlp_bias=True),
    dict(expert_score_bias=True, score_function="sigmoid", load_balancing_loss_weight=0.1, z_loss_weight=0.1),
    dict(token_rounding="stochastic_score", top_k=1),
    dict(gradient_accumulation_fusion=True, mlp_impl="fused"),
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_a_layers_first_call_ahead_leaves_the_layer_as_it_is(changes, on_cpu, monkeypatch):
    """Its parameters get no gradient, its counts stay, and router and experts are part of the step."""
    config = MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, **{"top_k": 2, **changes})
    layer, x = dMoE(config), torch.randn(6, 8, requires_grad=True)
    for p in layer.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p), False
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    counts, results, backward = layer.router.tokens_since_update, [], launch._backward_ahead

    def both(step):
        results.extend(step)
        return backward(step)

    monkeypatch.setattr(launch, "_backward_ahead", both)
    layer._compile_first_call(x)
    assert results[0].shape == x.shape and results[0].requires_grad, "the experts were left out"
    assert len(results) == 1 + (config.load_balancing_loss_weight > 0) + (config.z_loss_weight > 0)
    assert x.grad is None and all(p.grad is None for p in layer.parameters())
    assert all(bool((p.main_grad == 1).all()) and not p.grad_added_to_main_grad for p in layer.parameters())
    assert counts is None or not counts.any()
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("around", ["hook", "wrapper"])
def test_what_is_put_around_experts_is_not_called_ahead(around, on_cpu):
    """It may gather parameters from other ranks, or count."""
    layer, x = dMoE(MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4)), torch.randn(6, 8, requires_grad=True)
    called, experts = [], layer.experts
    if around == "hook":
        experts.register_forward_pre_hook(lambda *_: called.append(1))
    else:

        class Wrapper(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.module = experts

            def forward(self, *args):
                called.append(1)
                return self.module(*args)

        layer.experts = Wrapper()
    layer._compile_first_call(x)
    assert not called
    layer(x)
    assert called


def test_a_copy_of_a_module_compiles_for_itself(on_cpu):
    module = Part()
    assert _ran(module) == 1
    launch._done.clear()  # as another process finds it
    assert _ran(copy.deepcopy(module)) == 1
    launch._done.clear()
    assert _ran(pickle.loads(pickle.dumps(module))) == 1


def test_a_call_under_a_capture_is_not_the_first(on_cpu, monkeypatch):
    module = Part()
    with monkeypatch.context() as capturing:
        capturing.setattr(launch, "can_compile_ahead", lambda: False)
        assert _ran(module) == 0
    assert _ran(module) == 1
