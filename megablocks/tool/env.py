"""`env`: versions, GPUs, and which kernel each family of ops uses here, with the reason.

Every answer comes from the function with which the op itself chooses. It gets small bfloat16 tensors on the first GPU,
or on the CPU without one. Nothing is compiled. An op can still use another kernel for a shape that the first one does
not support, such as widths that are not a multiple of 8.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megablocks.monitor.env_report import commit, gpus, version
from megablocks.tool.commands import Parser, check_switches

if TYPE_CHECKING:
    import torch

PACKAGES = ("megablocks", "torch", "triton", "megatron-core", "transformers", "transformer-engine")
PRINTED = ("MEGABLOCKS_HOPPER", "MEGABLOCKS_COMPILE_AHEAD", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
"""Environment variables that are printed if they are set."""
HOPPER, TRITON, TORCH, REFERENCE = "Hopper (Gluon)", "Triton", "torch", "reference"
_WIDTH = 64  # of the small tensors: every kernel supports it


def _driver() -> str:
    """Return the NVIDIA driver's version, or "none" without a driver."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return "none"
    return next((word for word in words if word[0].isdigit()), "unknown")


def versions() -> dict[str, str]:
    """Return the versions of what is installed, by name."""
    found = {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}
    cuda = "none"
    if importlib.util.find_spec("torch") is not None:
        import torch

        cuda = torch.version.cuda or "none"
    return {**found, "CUDA (torch)": cuda, "NVIDIA driver": _driver(), "commit": commit()}


def kernels(x: torch.Tensor) -> dict[str, str]:
    """Return which kernels each family of ops uses for a tensor (64, 64) in bfloat16."""
    from megablocks.ops import adam, add_norm
    from megablocks.ops.grouped import grouped_mm
    from megablocks.ops.library import runs_triton
    from megablocks.ops.routing import topk
    from megablocks.ops.routing.values import RouterOptions
    from megablocks.ops.sparse.products import hopper_kernels

    def plain(takes: bool) -> str:
        return TRITON if takes else REFERENCE

    every_gpu = plain(runs_triton(x))
    if grouped_mm.hopper_ragged_m(x) is not None:
        products = HOPPER
    else:
        products = TORCH if grouped_mm.has_torch_kernel(x) else plain(grouped_mm.twin_kernels(x) is not None)
    return {
        "fused": products,
        "grouped": products,
        "sparse": every_gpu if hopper_kernels(x) is None else HOPPER,
        "scatter": every_gpu,
        "router": plain(topk.kernels_take(x, _WIDTH, RouterOptions(2))),
        "permute": every_gpu,
        "quant": every_gpu,
        "loss": every_gpu,
        "norm": plain(add_norm.kernels_take(x)),
        "rope": every_gpu,
        "adam": plain(adam.fits((x.float(),), x)),
    }


WITH_HOPPER = ("fused", "grouped", "sparse")
"""Families with special kernels for Hopper."""


def reason(family: str, path: str, device: torch.device) -> str:
    """Return why a family uses this path on a device, in a few words."""
    import torch

    from megablocks.ops.hopper import TRITON_RELEASES, why_off

    if device.type != "cuda":
        built = torch.version.cuda or torch.version.hip
        return "no GPU" if built else "this torch is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if path in (HOPPER, REFERENCE):
        return "Hopper GPU" if path == HOPPER else "not supported by the kernels"
    if family not in WITH_HOPPER:
        return "one kernel for every GPU"
    off = why_off(device.index or 0)
    if off == "this release of Triton":
        return f"Triton {version('triton')}; kernels for Hopper need >={TRITON_RELEASES[0]},<{TRITON_RELEASES[1]}"
    return off or "compute capability {}.{}; Hopper is 9.0".format(*torch.cuda.get_device_capability(device))


def paths() -> dict[str, dict[str, str]]:
    """Return kernel and reason of each family, on the first GPU or the CPU."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    x = torch.zeros(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=device)
    return {family: {"kernel": kernel, "why": reason(family, kernel, device)} for family, kernel in kernels(x).items()}


def report() -> dict[str, Any]:
    """Return everything that `env` prints; without torch only the versions."""
    switches = {name: os.environ[name] for name in PRINTED if name in os.environ}
    if importlib.util.find_spec("torch") is None:
        return {"versions": versions(), "switches": switches, "gpus": [], "ops": {}}
    check_switches()
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
