"""Adam and AdamW in one pass over each parameter, and the norm of many gradients in one pass before it.

    g ← s·g + λ·p                    s: factor of the whole gradient, read on the device; λ: weight decay of Adam (L2)
    m ← m + (1 − β1)·(g − m)
    v ← β2·v + (1 − β2)·g²
    p ← (1 − α·λ')·p − α / (1 − β1ᵗ) · m / (√v / √(1 − β2ᵗ) + ε)         α: learning rate; λ': weight decay of AdamW
    copy ← p                          rounded to the dtype of the model, if there is a copy

Everything except the copy is float32. A parameter costs 28 bytes of memory traffic (g read; m, v, p read and written),
30 with a copy in bf16 or fp16. The norm before it reads 4 more. Source: Loshchilov and Hutter 2019; torch.optim.AdamW.

The step changes tensors in place by their addresses. So it is no custom op: torch.compile and autograd do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.library import runs_triton

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
_OF_THE_RUN = ("decoupled_weight_decay", "capturable", "fused", "foreach", *UNSUPPORTED)
CHUNK = 16384
"""Elements per program."""
ALIGNMENT = 16
"""Bytes. If all addresses, and the size in elements, are multiples of it, a thread reads 16 bytes at once."""


class Scalars(NamedTuple):
    """The numbers of one step, in the order of the kernel's table."""

    share1: float  # 1 − β1
    beta2: float
    share2: float  # 1 − β2
    l2: float
    decay: float  # 1 − α·λ'
    rate: float  # α / (1 − β1ᵗ)
    root: float  # 1 / √(1 − β2ᵗ)
    eps: float


class Item(NamedTuple):
    """One tensor's row in a table. Tensors of one kind share a launch."""

    kind: Hashable
    numbers: tuple[int, ...]  # the size first


class Table(NamedTuple):
    """rows (tensors, columns) int64: a tensor's size, then addresses. A program processes one chunk of one tensor.

    chunks (programs, 2) int32: the row and the chunk.
    """

    kind: Any
    rows: Tensor
    chunks: Tensor


class Tables:
    """Tables of addresses on the device. They are rebuilt when any size, address or kind differs from the last call."""

    def __init__(self) -> None:
        self._items: Sequence[Item] = ()
        self._tables: list[Table] = []

    def of(self, items: list[Item], device: torch.device) -> list[Table]:
        """The tables of these parameters, one for each kind; rebuilt only if something changed."""
        if items != self._items:
            kinds: dict[Hashable, list[tuple[int, ...]]] = {}
            for kind, numbers in items:
                if numbers[0]:
                    kinds.setdefault(kind, []).append(numbers)
            self._tables = [_table(kind, rows, device) for kind, rows in kinds.items()]
            self._items = items
        return self._tables


def _table(kind: Hashable, rows: list[tuple[int, ...]], device: torch.device) -> Table:
    """rows: sizes and addresses of parameters of one kind → the table, with a line for each chunk of a parameter."""
    table = torch.tensor(rows, dtype=torch.int64)
    count = (table[:, 0] + CHUNK - 1) // CHUNK
    row = torch.repeat_interleave(torch.arange(len(rows)), count)
    chunk = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return Table(kind, to_device(table, device), to_device(torch.stack([row, chunk], 1).int(), device))


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for the GPU."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def scalars_of(group: dict[str, Any], step: float) -> Scalars:
    """group: one of torch's param_groups. step: t, 1 at the first step."""
    (beta1, beta2), lr, weight_decay = group["betas"], float(group["lr"]), group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    return Scalars(
        share1=1 - beta1,
        beta2=beta2,
        share2=1 - beta2,
        l2=0.0 if decoupled else weight_decay,
        decay=1 - lr * weight_decay if decoupled else 1.0,
        rate=lr / (1 - beta1**step),
        root=(1 - beta2**step) ** -0.5,
        eps=group["eps"],
    )


def adam_ref(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, s: Scalars, scale: Tensor | None) -> None:
    """One step in place, in the dtype of p; every tensor has the shape of p. Does not change g.

    A scale that is NaN changes nothing.
    """
    g = g.to(p.dtype) * (1.0 if scale is None else scale.to(p.dtype)) + s.l2 * p
    new_m = m.lerp(g, s.share1)
    new_v = (v * s.beta2).addcmul_(g, g, value=s.share2)
    new_p = (p * s.decay).addcdiv_(new_m, (new_v.sqrt() * s.root).add_(s.eps), value=-s.rate)
    for old, new in ((m, new_m), (v, new_v), (p, new_p)):
        old.copy_(new if scale is None else torch.where(scale.isnan(), old, new))
    if copy is not None:
        copy.copy_(p)


def square_sum_ref(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    return sum((t.double().square().sum() for t in tensors), torch.zeros((), dtype=torch.float64, device=device))


def square_sum(tensors: Sequence[Tensor], device: torch.device, tables: Tables | None = None) -> Tensor:
    """Σ x² over all elements of all tensors: () float64, on the device. The same input gives the same bits.

    Args:
        tables: keeps the addresses of the last call, so that the next one need not copy them to the GPU.
    """
    fit = [t for t in tensors if runs_triton(t) and t.dtype == torch.float32 and t.is_contiguous()]
    if not fit:
        return square_sum_ref(tensors, device)
    from megablocks.ops.adam_triton import square_sum_launch

    items = [Item(_aligned(t), (t.numel(), t.data_ptr())) for t in fit]
    total = square_sum_launch((tables or Tables()).of(items, device), device)
    if len(fit) < len(tensors):
        total = total + square_sum_ref([t for t in tensors if not any(t is f for f in fit)], device)
    return total


def _aligned(*tensors: Tensor) -> bool:
    return not any(t.data_ptr() % ALIGNMENT for t in tensors) and tensors[0].numel() % ALIGNMENT == 0


class FusedAdam(torch.optim.Adam):
    """torch's Adam, or AdamW with `decoupled_weight_decay=True`. Its step is one launch for all float32 parameters.

    State and state_dict are torch's (`step`, `exp_avg`, `exp_avg_sq`), so each class loads the other's. The base class
    is Adam, because AdamW sets `decoupled_weight_decay` to True in everything that it loads.

    The host reads nothing from the GPU. `step` is `prepare`, which computes the step's numbers on the host and copies
    them to the GPU without waiting, and `launch`. While a CUDA graph is captured `step` only launches: then call
    `prepare` before each replay, with parameters, gradients and state where they were at the capture.

    If a parameter, its gradient or its state is not on a GPU, contiguous and float32, `adam_ref` computes its step.

    Attributes:
        grad_scale: () or (1,) float32 on the device. The next step multiplies gradients by it; None means 1. With NaN
            the next step changes no parameter and no moment. A step sets it to None.
        copies: parameter → tensor with the same number of elements, to which each step writes the new parameter.

    Raises:
        ValueError: an option that it does not have, such as amsgrad.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        # A GradScaler multiplies the grad_scale of a fused optimizer by its scale, and lets the step divide by it.
        super().__init__(params, **{**options, "fused": None})
        self._reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's; a group may have options of its own.

        Raises:
            ValueError: an option that a step would ignore, such as amsgrad.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @classmethod
    def of(cls, optimizer: torch.optim.Adam) -> FusedAdam:
        """Take over the parameters, options and state of torch's Adam or AdamW. Do not use that optimizer afterwards.

        Raises:
            ValueError: as for the class.
        """
        made = cls([torch.empty(0)], **optimizer.defaults)  # torch refuses views of parameters, which shards can be
        for group in optimizer.param_groups:
            _check_options(group)
        made.param_groups, made.state = optimizer.param_groups, optimizer.state
        made._count_on_host()
        return made

    def _count_on_host(self) -> None:
        """Move step counts to the host, which reads them. torch's fused Adam keeps them on the parameter's device."""
        for one in self.state.values():
            if "step" in one:
                one["step"] = one["step"].to("cpu", torch.float32)

    def _reset(self) -> None:
        """Forget what is prepared for a step: addresses, scalars, copies."""
        self.grad_scale: Tensor | None = None
        self.copies: dict[Tensor, Tensor] = {}
        self._tables = Tables()
        self._prepared: list[Table] = []  # the tables of addresses
        self._references: list[tuple[Any, ...]] = []
        self._scalars: Tensor | None = None
        self._one: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            step = float(group.pop("step", 0))  # where Transformer Engine counts; Megatron's empty state has none
            for one in (state["state"][p] for p in group["params"] if p in state["state"]):
                one.setdefault("step", torch.tensor(step))
        super().__setstate__(state)
        if not hasattr(self, "copies"):  # unpickled, not loaded
            self._reset()
        for group in self.param_groups:
            # the run chooses these, not the checkpoint
            group.update({name: self.defaults[name] for name in _OF_THE_RUN})
        self._count_on_host()

    def _init_state(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter, made at its first step."""
        state: dict[str, Any] = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if "step" not in state:
            state["step"] = torch.zeros(())
        return state

    @torch.no_grad()
    def prepare(self) -> None:
        """The host's part of a step: count it, and copy its numbers and any new address to the GPU."""
        items: list[Item] = []
        self._references = []
        steps: list[Tensor] = []
        rows: dict[tuple[int, float], int] = {}  # a group's parameters may have stepped different numbers of times
        device = None
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._init_state(p)
                steps.append(state["step"])
                row = rows.setdefault((number, float(state["step"]) + 1), len(rows))
                copy = self.copies.get(p)
                if copy is not None and copy.data_ptr() == p.data_ptr():
                    copy = None  # the distributed optimizer's float32 shards are the model's own memory
                tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
                if fits(tensors, copy):
                    device = p.device
                    items.append(_item(tensors, copy, row))
                else:
                    self._references.append((*tensors, copy, row))
        if steps:
            torch._foreach_add_(steps, 1)
        scalars = [scalars_of(self.param_groups[number], step) for number, step in rows]
        self._references = [(*tensors, scalars[row]) for *tensors, row in self._references]
        self._prepared = []
        if device is not None:
            self._to_device(items, scalars, device)

    def _to_device(self, items: list[Item], scalars: list[Scalars], device: torch.device) -> None:
        """Copy addresses and scalars of a step to the GPU; the addresses only if they changed."""
        self._prepared = self._tables.of(items, device)
        if self._scalars is None or len(self._scalars) != len(scalars) or self._scalars.device != device:
            self._scalars = torch.empty(len(scalars), len(Scalars._fields), dtype=torch.float32, device=device)
            self._one = torch.ones((), device=device)
        # always the same memory, which a captured graph reads; the pinned copy is new, because the GPU can lag by steps
        self._scalars.copy_(to_device(torch.tensor(scalars, dtype=torch.float32), device), non_blocking=True)

    @torch.no_grad()
    def launch(self) -> None:
        """The GPU's part of a step."""
        scale, self.grad_scale = self.grad_scale, None
        if self._prepared:
            from megablocks.ops.adam_triton import adam_launch

            assert self._scalars is not None and self._one is not None
            adam_launch(self._prepared, self._scalars, self._one if scale is None else scale)
        for p, g, m, v, copy, scalars in self._references:
            adam_ref(p, g, m, v, None if copy is None else copy.view(p.shape), scalars, scale)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step.

        Raises:
            ValueError: closure is not None.
        """
        if closure is not None:
            raise ValueError(f"closure={closure!r}: must be None; compute the gradients before the step")
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.prepare()
        self.launch()


def _check_options(group: dict[str, Any]) -> None:
    """Refuse what the step would ignore."""
    for name in UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name}={group[name]!r}: must be False with FusedAdam, or use torch.optim.Adam")


def fits(tensors: tuple[Tensor, ...], copy: Tensor | None) -> bool:
    """Whether the kernel supports a parameter: float32 on a GPU, all tensors contiguous."""
    return (
        runs_triton(tensors[0])
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and (copy is None or copy.is_contiguous())
    )


def _item(tensors: tuple[Tensor, ...], copy: Tensor | None, row: int) -> Item:
    """The table row of a parameter: sizes and addresses. row: the row of its scalars."""
    every = tensors if copy is None else (*tensors, copy)
    addresses = [t.data_ptr() for t in every] + [0] * (5 - len(every))
    kind = (None if copy is None else copy.dtype, _aligned(*every))
    return Item(kind, (tensors[0].numel(), row, *addresses))
