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

from megablocks import MoEConfig, dMoE
from megablocks.layers import ahead, experts
from megablocks.ops import launch

PROGRAM = """
import functools
import threading
import torch
from triton import knobs
from triton.runtime import cache
from megablocks.ops.launch import compile_ahead, is_compiling_ahead
from megablocks.testing.compile_only import compiling_for

hashed, hash_files = [], cache.triton_key.__wrapped__
cache.triton_key = functools.lru_cache(lambda: hashed.append(threading.current_thread().name) or hash_files())
made = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: made.append((src.name, threading.current_thread().name))

def ints(n):
    return torch.ones(n, dtype=torch.int32)

def bookkeeping(tokens):
    from megablocks.ops.routing.dispatch_triton import dispatch_launch
    return dispatch_launch(ints(tokens), ints(tokens), tokens, 8, 1)

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
assert hashed == ["hash of Triton"], hashed  # once, and waited for
assert all(not t.any() for t in ahead), "what no kernel has written is not 0"
print("compiled ahead")
"""


def test_experts_on_a_gpu_start_the_hash_of_triton(monkeypatch):
    started = []
    monkeypatch.setattr(experts, "hash_triton", lambda: started.append(1))
    monkeypatch.setattr(experts, "can_compile_ahead", lambda: True)
    config = MoEConfig(hidden_size=8, ffn_hidden_size=8, num_experts=2)
    experts.Experts(config)
    assert not started  # on a CPU
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    experts.Experts(config)
    assert started == [1]


def test_launches_compile_in_threads_and_are_not_compiled_again(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout == "compiled ahead\n", done.stderr[-2000:]


@pytest.fixture
def steps(monkeypatch):
    """The steps that are compiled for; on a GPU each would run in compiling_ahead."""
    ran = []
    monkeypatch.setattr(launch, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(ahead, "_compile", lambda device, step: ran.append(step()))
    monkeypatch.setattr(ahead, "_done", set())
    return ran


X, W = torch.zeros(3), torch.nn.Parameter(torch.zeros(2))


def test_once_a_kind_of_call_and_once_for_modules_alike(steps):
    first, twin, other = ahead.Ahead("a", 1), ahead.Ahead("a", 1), ahead.Ahead("b", 1)
    for module in (first, first, twin, other):
        module("sorted", X, W, lambda: "sorted")
    assert steps == ["sorted"] * 2
    first("dispatched", X, W, lambda: "dispatched")
    first("sorted", X.double(), W, lambda: "double")
    with torch.no_grad():
        first("sorted", X, W, lambda: "no gradient")
    assert steps[2:] == ["dispatched", "double", "no gradient"]


def test_what_fails_is_left_to_the_call_itself(steps):
    def fails():
        raise torch.OutOfMemoryError("full")

    module = ahead.Ahead("a")
    module("sorted", X, W, fails)
    module("sorted", X, W, lambda: "again")
    assert steps == []


def test_sharded_parameters_are_left_alone(steps):
    class Sharded(torch.nn.Parameter):
        pass

    ahead.Ahead("a")("sorted", X, Sharded(torch.zeros(2)), lambda: "sharded")
    assert steps == []


def test_a_checkpoint_around_the_call_sees_nothing_of_it(monkeypatch):
    """Nor do the caller's gradients, generator and hooks."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "compile_ahead", lambda step: step())
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    w, packed, ran = torch.ones(3, requires_grad=True), [], []

    def step():
        y = ahead.leaf(w) * torch.rand(3).requires_grad_()
        y.register_hook(ran.append)
        return [y.exp(), torch.zeros(3)]

    before = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        ahead._compile(torch.device("cpu"), step)
    assert len(ran) == 1 and not ran[0].any(), "backward ran with zeros"
    assert packed == [] and w.grad is None and torch.equal(torch.get_rng_state(), before)


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
        launch.compile_ahead(lambda: launch.backward_ahead([Op.apply(x), torch.ones(2)]))
    assert len(seen) == 1 and not seen[0].any() and not x.grad.any()


CONFIGS = [
    dict(),
    dict(mlp_impl="reference", activation="swiglu", mlp_bias=True),
    dict(expert_score_bias=True, score_function="sigmoid", load_balancing_loss_weight=0.1, z_loss_weight=0.1),
    dict(token_rounding="stochastic_score", top_k=1),
    dict(gradient_accumulation_fusion=True, mlp_impl="fused"),
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_a_layers_step_ahead_leaves_the_layer_as_it_is(changes):
    """Its parameters get no gradient, nor main_grad any, and its counts stay."""
    config = MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, **{"top_k": 2, **changes})
    layer, x = dMoE(config), torch.randn(6, 8, requires_grad=True)
    for p in layer.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p), False
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    counts = layer.router.tokens_since_update
    launch._here.ahead = True  # launches of the kernels would compile
    try:
        results = layer._step_ahead(x)
        launch.backward_ahead(results)
    finally:
        launch._here.ahead = False
    assert results[-1].shape == x.shape and results[-1].requires_grad, "the experts were left out"
    assert x.grad is None and all(p.grad is None for p in layer.parameters())
    assert all(bool((p.main_grad == 1).all()) and not p.grad_added_to_main_grad for p in layer.parameters())
    assert counts is None or not counts.any()
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("around", ["hook", "forward", "wrapper"])
def test_what_is_put_around_experts_is_not_called_ahead(around):
    """It may gather parameters from other ranks, or count."""
    layer, x = dMoE(MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4)), torch.randn(6, 8, requires_grad=True)
    called, experts = [], layer.experts
    if around == "hook":
        experts.register_forward_pre_hook(lambda *_: called.append(1))
    if around == "forward":
        forward, experts.forward = experts.forward, lambda *args: called.append(1) or forward(*args)
    if around == "wrapper":

        class Wrapper(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.module = experts

            def forward(self, *args):
                called.append(1)
                return self.module(*args)

        layer.experts = Wrapper()
    results = layer._step_ahead(x)
    assert not called and all(t.shape != x.shape for t in results)
    layer(x)
    assert called


def test_a_copy_of_a_module_compiles_for_itself(steps):
    module = ahead.Ahead("a", 1)
    module("sorted", X, W, lambda: "sorted")
    ahead._done.clear()  # as another process finds it
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other("sorted", X, W, lambda: "again")
    assert steps == ["sorted", "again"]


def test_a_call_under_a_capture_is_not_the_first(steps, monkeypatch):
    module = ahead.Ahead("a")
    with monkeypatch.context() as capturing:
        capturing.setattr(launch, "can_compile_ahead", lambda: False)
        module("sorted", X, W, lambda: "captured")
    module("sorted", X, W, lambda: "sorted")
    assert steps == ["sorted"]


def test_leaf_has_no_history():
    x = torch.ones(2, requires_grad=True) * 2
    assert x.grad_fn is not None and ahead.leaf(x).is_leaf and ahead.leaf(x).requires_grad
    assert ahead.leaf(None) is None and not ahead.leaf(x.detach()).requires_grad
