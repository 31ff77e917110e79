"""L4: `import megablocks` has no side effects."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "megatron", "transformers", "numpy", "matplotlib")

PROBE = """
import json, os, sys, threading, time
before = dict(os.environ), sys.path[:], threading.active_count()
loaded = set(sys.modules)
start = time.process_time()
import megablocks
seconds = time.process_time() - start
print(json.dumps({
    "version": megablocks.__version__,
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - loaded}),
    "unchanged": before == (dict(os.environ), sys.path[:], threading.active_count()),
    "seconds": seconds,
}))
"""


def _probe(*flags: str) -> dict:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", PROBE], env=environment, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_L4_import_loads_nothing_heavy_and_changes_nothing() -> None:
    seen = _probe()
    assert not set(seen["new"]) & set(HEAVY), seen["new"]
    assert seen["unchanged"]
    assert seen["seconds"] < 1.0


def test_L4_import_works_in_a_bare_interpreter() -> None:
    # -S leaves site-packages out: no torch, numpy or packaging can be found at all.
    seen = _probe("-S")
    assert seen["version"]


def test_L4_the_layers_work_without_triton() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules["triton"] = None  # as torch's build for CPUs leaves it out
import torch
from megablocks import MoEConfig, dMoE, layers, ops
from megablocks.kinds import IMPLS
for impl in IMPLS:
    x = torch.randn(5, 64, requires_grad=True)
    dMoE(MoEConfig(hidden_size=64, ffn_hidden_size=64, num_experts=2, mlp_impl=impl))(x).sum().backward()
for name in (*layers.__all__, *ops.__all__):
    getattr(layers if name in layers.__all__ else ops, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_L4_config_needs_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import megablocks as m; c = m.MoEConfig(hidden_size=8, " + (
        "ffn_hidden_size=8, num_experts=2); assert c.to_dict()['num_experts'] == 2"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd="/")


def test_L4_layers_leave_cuda_alone() -> None:
    code = (
        "import megablocks, sys; megablocks.dMoE, megablocks.MoE, megablocks.Arguments; "
        "import torch; assert not torch.cuda.is_initialized(); "
        "assert not {'megatron', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/")


def test_L4_each_public_name_resolves() -> None:
    import megablocks.layers
    import megablocks.ops

    for name in megablocks.__all__:
        assert getattr(megablocks, name) is not None
        assert name in dir(megablocks)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        megablocks.nonsense  # noqa: B018
    for module in (megablocks.ops, megablocks.layers):
        for path in set(module._PUBLIC.values()):  # once imported, a module of a function's name would take its place
            importlib.import_module(path)
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
            assert name in dir(module)
