"""`env`: versions, GPUs, and which kernel each family of ops takes here, with the reason.

Every answer comes from the function by which the op itself decides, asked about small bfloat16 tensors on the first
GPU, or on the CPU without one. Nothing is compiled. An op may still take another kernel for a shape that the
first one does not take, such as widths that are no multiple of 8.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megablocks.monitor.env_report import commit, gpus, version
from megablocks.tool.commands import Parser

if TYPE_CHECKING:
    import torch

PACKAGES = ("megablocks", "torch", "triton", "megatron-core", "transformers", "transformer-engine")
SWITCHES = ("MEGABLOCKS_HOPPER", "MEGABLOCKS_COMPILE_AHEAD", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
HOPPER, TRITON, TORCH, REFERENCE = "Hopper (Gluon)", "Triton", "torch", "reference"
_WIDTH = 64  # of the tensors that the ops are asked about: every kernel takes it


def _driver() -> str:
    """The NVIDIA driver's version, "none" without one."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return "none"
    return next((word for word in words if word[0].isdigit()), "unknown")


def versions() -> dict[str, str]:
    """What is installed, by name."""
    found = {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}
    cuda = "none"
    if importlib.util.find_spec("torch") is not None:
        import torch

        cuda = torch.version.cuda or "none"
    return {**found, "CUDA (torch)": cuda, "NVIDIA driver": _driver(), "commit": commit()}


def _path_of(kernels: ModuleType | None, otherwise: str) -> str:
    """The kind of a module of kernels, by its name."""
    if kernels is None:
        return otherwise
    return HOPPER if "_hopper" in kernels.__name__ else TRITON


def _products(x: torch.Tensor) -> str:
    """Kernels of the grouped products, which the other implementations of experts share."""
    from megablocks.ops.grouped import grouped_mm as ops

    if (hopper := ops.hopper_ragged_m(x)) is not None:
        return _path_of(hopper, TORCH)
    return TORCH if ops.has_torch_kernel(x) else _path_of(ops.twin_kernels(x), REFERENCE)


def _sparse(x: torch.Tensor) -> str:
    from megablocks.ops.sparse.products import hopper_kernels

    return _path_of(hopper_kernels(x), _plain(x))


def _router(x: torch.Tensor) -> str:
    from megablocks.ops.routing.topk import kernels_take
    from megablocks.ops.routing.values import RouterOptions

    return TRITON if kernels_take(x, _WIDTH, RouterOptions(2)) else REFERENCE


def _norm(x: torch.Tensor) -> str:
    from megablocks.ops.norm import kernels_take

    return TRITON if kernels_take(x) else REFERENCE


def _adam(x: torch.Tensor) -> str:
    from megablocks.ops.adam import fits

    return TRITON if fits((x.float(),), x) else REFERENCE


def _plain(x: torch.Tensor) -> str:
    from megablocks.ops.library import runs_triton

    return TRITON if runs_triton(x) else REFERENCE


FAMILIES: dict[str, Callable[[torch.Tensor], str]] = {
    "fused": _products,
    "grouped": _products,
    "sparse": _sparse,
    "scatter": _plain,
    "router": _router,
    "permute": _plain,
    "quant": _plain,
    "loss": _plain,
    "norm": _norm,
    "rope": _plain,
    "adam": _adam,
}
"""How each family says which kernels it takes for a tensor (64, 64) of bfloat16."""
WITH_HOPPER = ("fused", "grouped", "sparse")
"""Families that have kernels of their own for Hopper."""


def reason(family: str, path: str, device: torch.device) -> str:
    """Why a family takes this path on a device, in a few words."""
    import torch

    from megablocks.ops.hopper import TRITON_RELEASES, why_off

    if device.type != "cuda":
        built = torch.version.cuda or torch.version.hip
        return "no GPU" if built else "this torch is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if path in (HOPPER, REFERENCE):
        return "Hopper GPU" if path == HOPPER else "outside what the kernels take"
    if family not in WITH_HOPPER:
        return "one kernel for every GPU"
    off = why_off(device.index or 0)
    if off == "this release of Triton":
        return f"Triton {version('triton')}; kernels for Hopper take >={TRITON_RELEASES[0]},<{TRITON_RELEASES[1]}"
    return off or "compute capability {}.{}; Hopper is 9.0".format(*torch.cuda.get_device_capability(device))


def paths() -> dict[str, dict[str, str]]:
    """Kernel and reason of each family, on the first GPU or the CPU."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    x = torch.zeros(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=device)
    found = {}
    for family, decide in FAMILIES.items():
        path = decide(x)
        found[family] = {"kernel": path, "why": reason(family, path, device)}
    return found


def report() -> dict[str, Any]:
    """Everything that `env` prints. Without torch, only the versions."""
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    if importlib.util.find_spec("torch") is None:
        return {"versions": versions(), "switches": switches, "gpus": [], "ops": {}}
    return {"versions": versions(), "switches": switches, "gpus": gpus(), "ops": paths()}


def text_of(found: dict[str, Any]) -> str:
    lines = [f"{name + ':':<20}{value}" for name, value in {**found["versions"], **found["switches"]}.items()]
    lines += [f"{f'GPU {i}:':<20}{gpu['name']}, compute capability {gpu['capability']}, {gpu['gib']} GiB"
              for i, gpu in enumerate(found["gpus"])] or [f"{'GPU:':<20}none"]  # fmt: skip
    rows = [f"{family:<10}{row['kernel']:<16}{row['why']}" for family, row in found["ops"].items()]
    return "\n".join([*lines, "", f"{'ops':<10}{'kernel':<16}why", *rows])


def main(argv: Sequence[str]) -> int:
    parser = Parser("env", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = report()
    print(json.dumps(found, indent=1) if options.json else text_of(found))
    return 0
