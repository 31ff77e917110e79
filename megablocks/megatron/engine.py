"""Transformer Engine together with our layers: where it can be used, and where megatron-core needs help with it.

With `--transformer-impl transformer_engine`, the default if it is installed, attention, norms and linear layers of a
block are Transformer Engine's, and our layer replaces the feed-forward layer. `specs` builds the block.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def why_not() -> str | None:
    """Why a model cannot use Transformer Engine's layers here, None if it can."""
    if importlib.machinery.PathFinder.find_spec("transformer_engine") is None:  # `cpu` hides it from an import
        return "Transformer Engine is not installed"
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return "Transformer Engine cannot be imported"
    from transformer_engine.pytorch.utils import get_cudnn_version

    try:
        ours = torch.backends.cudnn.version()
    except RuntimeError:  # torch finds a cuDNN that it was not compiled for
        ours = None
    return cudnn_conflict(get_cudnn_version(), ours)


def cudnn_conflict(theirs: tuple[int, int, int], ours: int | None) -> str | None:
    """Why Transformer Engine's attention would be unfused: it has loaded another cuDNN than torch. None if it has not.

    Args:
        theirs: version of Transformer Engine's cuDNN.
        ours: version of torch's, such as 91900 for 9.19.0; None if torch refuses the one that it finds.
    """
    major, minor, patch = theirs
    if ours == 10000 * major + 100 * minor + patch:
        return None
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    fix = "let both find the same one"
    if spec is not None and spec.submodule_search_locations:
        cudnn = Path(list(spec.submodule_search_locations)[0])
        fix = f"set CUDNN_HOME={cudnn}, and LD_LIBRARY_PATH to all folders {cudnn.parent}/*/lib"
    return f"Transformer Engine has loaded cuDNN {major}.{minor}.{patch} beside torch's; {fix}"


def accumulate_without_apex() -> None:
    """Let Megatron's own linear layers accumulate their gradients in the product, as Transformer Engine's do.

    With gradient accumulation fusion Megatron requires apex even if only the output layer, which is never Transformer
    Engine's, would use it. Transformer Engine's product does the same as apex's. Call it once per process.
    """
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return
    names = dict.fromkeys(("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), _add_product)
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(**names)
    layers._grad_accum_fusion_available = True


def _add_product(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad (O, I) += gradᵀ · x, of x (T, I) and grad (T, O)."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(x, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)


def without_extra_state(builder: Any) -> Any:
    """The builder of a norm of Transformer Engine that saves only its weights.

    The norm's extra state is for quantized inputs, which a norm does not have. Without it a checkpoint has the same
    tensors with and without Transformer Engine, so either can resume it. All other layers agree already.
    """

    class Plain:  # Megatron tells a class from a module by its type
        def __new__(cls, *args: Any, **options: Any) -> Any:
            norm = builder(*args, **options)
            norm.__class__ = _plain(type(norm))  # type: ignore[arg-type]
            return norm

    return Plain


@functools.cache
def _plain(kind: type) -> type:
    base = torch.nn.Module
    state = {"get_extra_state": base.get_extra_state, "set_extra_state": base.set_extra_state}
    return type(kind.__name__, (kind,), state)


def take_any_state(optimizer: Any) -> None:
    """Let Transformer Engine's Adam load what torch's or ours has saved: a step per parameter, but none per group.

    Ours loads Transformer Engine's state without help.
    """

    def complete(optimizer: Any, saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:
            states = [saved["state"].get(parameter, {}) for parameter in group["params"]]
            steps = [float(state.pop("step")) for state in states if "step" in state]
            if steps or "step" in group:
                group["step"] = int(max(steps, default=group.get("step")))
            for name, value in optimizer.defaults.items():
                group.setdefault(name, value)

    optimizer.register_load_state_dict_pre_hook(complete)
