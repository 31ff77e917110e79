"""Resuming Megatron's distributed optimizer with torch's Adam, or ours, which has torch's state.

Megatron takes it where neither apex nor Transformer Engine is installed, and elsewhere with `fused_optimizer`. Its
state holds a `step` tensor for each parameter. megatron-core 0.19.2 then has four faults, of which the second and third
make a resumed run train wrongly without an error:

1. `DistributedOptimizer.state_dict` asserts that all steps are equal. An optimizer that has not stepped yet, as when a
   checkpoint is loaded, has none. Fix: fill its state with zeros and step 0 first, as AdamW would.
2. `_set_main_param_and_optimizer_states` looks for every tensor of the state in what it loads, but `step` is saved with
   the parameter groups. Megatron's default format, which cannot be resharded, has the 0 of the new run there. Fix:
   leave `step` out.
3. `load_state_dict` gives all parameters the same `step` tensor. AdamW adds one to it for each parameter, so the bias
   correction is wrong. Fix: give each parameter a copy.
4. `_set_main_param_and_optimizer_states` copies in place into float32 parameters. Without mixed precision these are
   views of parameters, for which autograd refuses it. Fix: copy without autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megablocks.megatron.wrap import wrap


def install() -> None:
    """Apply the fixes, once a process. They leave an optimizer of another class alone."""
    wrap(
        DistributedOptimizer,
        state_dict=_with_state,
        load_state_dict=_with_own_steps,
        _set_main_param_and_optimizer_states=_without_steps,
    )


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", None), (torch.optim.Adam, torch.optim.AdamW))


def _with_state(original: Any, optimizer: Any) -> Any:
    """Stands for `state_dict`: the first fix."""
    if _is_torch_adam(optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
    return original(optimizer)


def _with_own_steps(original: Any, optimizer: Any, state_dict: Any) -> None:
    """Stands for `load_state_dict`: the third fix."""
    original(optimizer, state_dict)
    if _is_torch_adam(optimizer):
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _without_steps(original: Any, optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Stands for `_set_main_param_and_optimizer_states`: the second and the fourth fix."""
    if _is_torch_adam(optimizer):
        tensors = {**tensors, "step": None}  # the original skips a value that is not a tensor
    with torch.no_grad():
        original(optimizer, model_param, tensors)
