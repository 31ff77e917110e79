"""Compiling ahead: launches that compile beside each other and do not run, and a module's first calls."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from megablocks.layers import ahead
from megablocks.ops import launch

PROGRAM = """
import threading
import torch
from triton import knobs
from megablocks.ops.launch import compiling_ahead, is_compiling_ahead
from megablocks.testing.compile_only import compiling_for

made = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: made.append((src.name, threading.current_thread().name))

def ints(n):
    return torch.ones(n, dtype=torch.int32)

def bookkeeping(tokens):
    from megablocks.ops.routing.dispatch_triton import dispatch_launch
    return dispatch_launch(ints(tokens), ints(tokens), tokens, 8, 1)

with compiling_for(90):
    with compiling_ahead():
        assert is_compiling_ahead()
        ahead = bookkeeping(512)
        assert len(made) < 3, "a launch waited for its kernel"
    assert not is_compiling_ahead() and bool(torch.empty(8).fill_(1).all())
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
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
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
    monkeypatch.setattr(launch, "compiling_ahead", contextlib.nullcontext)
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


def test_leaf_has_no_history():
    x = torch.ones(2, requires_grad=True) * 2
    assert x.grad_fn is not None and ahead.leaf(x).is_leaf and ahead.leaf(x).requires_grad
    assert ahead.leaf(None) is None and not ahead.leaf(x.detach()).requires_grad
