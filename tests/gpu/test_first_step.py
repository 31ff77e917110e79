"""A layer's first step on a GPU with an empty cache: all of its kernels were compiled ahead, at the same time."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import threading
import torch
from triton import knobs
from megablocks import MoEConfig, dMoE

made = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: made.append((src.name, threading.current_thread().name))
impl, activation, dtype = sys.argv[1:]
config = MoEConfig(hidden_size=256, ffn_hidden_size=512, num_experts=8, top_k=2, activation=activation, mlp_impl=impl)
layer = dMoE(config, device="cuda", dtype=getattr(torch, dtype), seed=0)
x = torch.randn(500, 256, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
y, aux = layer.forward_with_aux(x)
ahead = len(made)
(y.float().square().mean() + sum(aux.losses.values())).backward()
late = [name for name, thread in made if thread == "MainThread"]
assert ahead and not late and len(made) == ahead, f"{ahead} ahead, then {late}"
assert all(p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in layer.parameters())
print("ahead", ahead)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("impl", ["auto", "grouped", "sparse", "scatter", "fused"])
def test_no_kernel_is_compiled_within_the_step(impl, activation, dtype, tmp_path):
    command = [sys.executable, "-c", PROGRAM, impl, activation, dtype]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("ahead "), done.stderr[-2000:]
