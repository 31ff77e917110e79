"""Resuming Megatron's distributed optimizer with torch's Adam, or ours, which has torch's state.

Megatron uses this Adam if neither apex nor Transformer Engine is installed, and otherwise with `fused_optimizer`. Its
state holds a `step` tensor for each parameter. megatron-core 0.19.2 then has four faults. The second and third make a
resumed run train wrongly without an error:

1. `DistributedOptimizer.state_dict` asserts that all steps are equal. An optimizer that has not stepped yet, as when a
   checkpoint is loaded, has none. Fix: fill its state with zeros and step 0 first, as AdamW would.
2. `_set_main_param_and_optimizer_states` looks for every tensor of the state in what it loads, but `step` is saved with
   the parameter groups. In Megatron's default format, which cannot be resharded, the new run finds its own 0 there.
   Fix: leave `step` out.
3. `load_state_dict` gives all parameters the same `step` tensor. AdamW adds one to it for each parameter, so the bias
   correction is wrong. Fix: give each parameter a copy.
4. `_set_main_param_and_optimizer_states` copies in place into float32 parameters. Without mixed precision these are
   views of parameters, where autograd refuses such a copy. Fix: copy without autograd.

The other optimizers have the first fault too, when they save. At a large loss scale the first steps of fp16 overflow,
and a checkpoint from before the first update could not be loaded. SGD's state could never be loaded, because Megatron
has no function that fills it. Fix: fill it as well, also before a load.

With every optimizer, the distributed one has a fifth fault, which makes a resumed run train wrongly too. Megatron's
format that can be resharded takes a parameter's state from the state of all buckets of gradients in a row. It leaves
out the padding behind each bucket there, but counts it where the next bucket begins. If a bucket did not end at a
multiple of 128 elements, the state of the next one, and with it its weights, was saved shifted: of a pipeline's tied
embedding, or, with overlapped gradients, of most parameters. Fix: keep the padding.

A pipeline stage without experts has an optimizer without parameters beside its other one. The distributed optimizer
could then not be saved, and the others not be loaded. If it was the first stage, which writes the steps, the experts'
steps began at 0 again. Fix: such an optimizer has the step of the other one, and loads nothing.

Apart from the state: Megatron does not decay parameters of one dimension, which biases usually are. The biases of our
experts have two. Fix: do not decay them either.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey

from megablocks.megatron.wrap import wrap

_NO_PARAMETER = "no parameter"
"""Key of the state that holds the step of an optimizer without parameters while it is saved."""


def install() -> None:
    """Apply the fixes. Call it once per process. They do not change optimizers of other classes."""
    wrap(
        DistributedOptimizer,
        state_dict=_with_state,
        load_state_dict=_with_own_steps,
        _set_main_param_and_optimizer_states=_without_steps,
        sharded_param_state_fully_reshardable=_with_padding,
    )
    for kind in (Float16OptimizerWithFloat16Params, FP32Optimizer):
        wrap(kind, sharded_state_dict=_with_state, load_state_dict=_with_a_step)
    wrap(ChainedOptimizer, sharded_state_dict=_with_a_common_step)
    wrap(megatron_optimizer, _get_param_groups=_without_decay_of_biases)


def _without_decay_of_biases(original: Any, model_chunks: Any, config: Any, overrides: Any) -> Any:
    """Wraps `_get_param_groups`: if it decays no biases, it decays none of our experts either."""
    if any(override.get("wd_mult") == 0 for override in (overrides or {}).values()):
        overrides = {**overrides, ParamKey(name="*.experts.core.[bc][12]"): {"wd_mult": 0.0}}
    return original(model_chunks, config, overrides)


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", None), (torch.optim.Adam, torch.optim.AdamW))


def _with_state(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `state_dict`, and `sharded_state_dict` of the other optimizers: the first fix."""
    inner: Any = getattr(optimizer, "optimizer", None)
    is_sgd = isinstance(inner, torch.optim.SGD)
    if is_sgd:
        optimizer.init_state_fn = lambda *_: None
    names = ("exp_avg", "exp_avg_sq") if _is_torch_adam(optimizer) else ("momentum_buffer",) if is_sgd else ()
    for group in inner.param_groups if names else ():
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state and (not is_sgd or group["momentum"]):
                state.update({name: torch.zeros_like(parameter) for name in names})
                if not is_sgd:
                    state["step"] = torch.zeros((), dtype=torch.float32)
    is_empty = _lacks_parameters(inner)
    if is_empty and _is_torch_adam(optimizer):
        inner.state[_NO_PARAMETER] = {"step": getattr(optimizer, "common_step", torch.zeros(()))}
    found = original(optimizer, *args, **kwargs)
    if is_empty:
        inner.state.clear()
        found.get("optimizer", found).get("state", {}).pop(_NO_PARAMETER, None)
        found.pop("fp32_from_fp16_params", None)  # without parameters, its lists do not fit those of other stages
    return found


def _lacks_parameters(inner: Any) -> bool:
    """Whether torch's optimizer has no parameters on this rank."""
    return inner is not None and not any(group["params"] for group in inner.param_groups)


def _with_a_common_step(original: Any, chained: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `sharded_state_dict` of several optimizers: those without parameters take the step of the others."""
    optimizers = [one for one in chained.chained_optimizers if _is_torch_adam(one)]
    states = (state for one in optimizers for state in one.optimizer.state.values() if "step" in state)
    if (state := next(states, None)) is not None:
        for one in optimizers:
            one.common_step = state["step"]
    return original(chained, *args, **kwargs)


def _with_own_steps(original: Any, optimizer: Any, state_dict: Any) -> None:
    """Wraps `load_state_dict`: the third fix."""
    original(optimizer, state_dict)
    if _is_torch_adam(optimizer):
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _with_a_step(original: Any, optimizer: Any, state_dict: Any) -> None:
    """Wraps `load_state_dict` of the others: Megatron does not save a step of 0, but Adam requires one.

    Neither does it save what an optimizer without parameters lacks.
    """
    if _lacks_parameters(getattr(optimizer, "optimizer", None)):
        state_dict.get("optimizer", state_dict).setdefault("state", {})
        if "optimizer" in state_dict:
            state_dict.setdefault("fp32_from_fp16_params", [])
    if _is_torch_adam(optimizer):
        for state in state_dict.get("optimizer", state_dict).get("state", {}).values():
            if isinstance(state, dict):
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
    original(optimizer, state_dict)


def _without_steps(original: Any, optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Wraps `_set_main_param_and_optimizer_states`: the second and the fourth fix."""
    if _is_torch_adam(optimizer):
        tensors = {**tensors, "step": None}  # the original skips a value that is not a tensor
    with torch.no_grad():
        original(optimizer, model_param, tensors)


def _with_padding(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `sharded_param_state_fully_reshardable`: while it runs, the sizes without padding are those with it."""
    sizes = [(buffer, buffer.numel) for buffer in optimizer.buffers]
    sizes += [(bucket, bucket.grad_data.numel()) for buffer in optimizer.buffers for bucket in buffer.buckets]
    before = [part.numel_unpadded for part, _ in sizes]
    try:
        for part, size in sizes:
            part.numel_unpadded = size
        return original(optimizer, *args, **kwargs)
    finally:
        for (part, _), size in zip(sizes, before, strict=True):
            part.numel_unpadded = size
