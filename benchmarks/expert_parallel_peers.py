"""What the peers of expert_parallel.py share: the arms of a layer beside ours, and calls that may fail on one rank.

A peer's layer has copies of the weights of our layer and our router, so both sides choose the same experts. The
gradients of its experts are sums over the ranks; `gradients` divides them, because ours are means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from expert_parallel import PHASES, Arms, Case, graph, judge, layer_inputs, layer_of, step_of, timer, times_of
from measure import TOLERANCE, Gate, relative_error
from torch import Tensor


def attempt(fn: Callable[[], Any]) -> tuple[Any, str]:
    """The result of fn, and why it failed on the first rank where it did, or "". A collective."""
    result, problem = None, ""
    try:
        result = fn()
    except Exception as error:  # a peer may raise anything; our arm goes on
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return result, next((p for p in problems if p), "")


def captured(
    fn: Callable[[], Any], poison: Callable[[], None] | None = None, check: Callable[[Any], None] | None = None
) -> Callable[[], object] | str:
    """fn as a CUDA graph: the call that replays it, or a line that says why a rank has none.

    check: raises where a replay's result is wrong. poison: fills before that replay what it must write. A peer may not
    look whether its launches succeeded, so a graph may lack them although nothing was raised.
    """
    result: list[Any] = []

    def call() -> None:
        result[:] = [fn()]

    replay, problem = attempt(lambda: graph(call))
    if not problem and check is not None:
        if poison is not None:
            poison()
        result[0].detach().fill_(math.nan)
        replay()
        problem = attempt(lambda: check(result[0]))[1]
    return problem or replay


class Peer:
    """The cases of expert_parallel.py with one peer. If it cannot run, a line says so, and only our arms are measured.

    NAME: of its arms. OURS: our dispatcher beside it. problem: why it is left out, or "".
    """

    NAME: str
    OURS: str
    problem: str

    def layer(self, ours: Any, case: Case, x: Tensor) -> Any:
        """The peer's layer, whose `poison` fills what its next step must write and whose `gradients` have our names."""
        raise NotImplementedError

    def facts(self, case: Case) -> dict[str, float]:
        """What a record of the peer's says beside its times."""
        return {}

    def step(self, layer: Any, x: Tensor, dy: Tensor, backward: bool) -> Tensor:
        return step_of(layer, x, dy, backward)

    def announce(self, about: str) -> None:
        if dist.get_rank() == 0:
            print(f"{self.NAME}: {f'left out, {self.problem}' if self.problem else about}", flush=True)

    def layer_case(self, case: Case, rounds: int, key: str, gate: Gate) -> Iterator[Arms]:
        """The eager arms, then the captured ones beside them."""
        x, dy = layer_inputs(case)
        ours, theirs = layer_of(case, self.OURS, dist.group.WORLD), None
        y = step_of(ours, x, dy, True)
        want = {"y": y, "dx": x.grad, "router": ours.router.layer.weight.grad}
        want |= {name: getattr(ours.experts, name).grad for name in ("w1", "v1", "w2")}
        want = {name: t.detach().clone() for name, t in want.items()}
        steps = {self.OURS: partial(step_of, ours, x, dy)}
        eager = f"{self.NAME}, eager"

        def found(y: Tensor, backward: bool) -> dict[str, Tensor]:
            return {"y": y.detach()} | ({"dx": x.grad, **theirs.gradients()} if backward else {})

        if not self.problem:
            theirs, problem = attempt(lambda: self.layer(ours, case, x))
            if not problem:
                theirs.poison()
                y, problem = attempt(lambda: self.step(theirs, x, dy, True))
            if problem:
                gate.take({"bad": f"{key}/{eager}", "why": problem})
            else:
                got = found(y, True)
                if judge(gate, f"{key}/{eager}", [got[name] for name in want], list(want.values())):
                    steps[self.NAME] = partial(self.step, theirs, x, dy)
        timers = {
            f"{arm}, eager/{phase}": timer(partial(step, backward))
            for arm, step in steps.items()
            for phase, backward in PHASES.items()
        }
        yield self._described(case, times_of(timers, rounds))
        if len(steps) == 1:
            return

        def check(backward: bool, y: Tensor) -> None:
            error = max(relative_error(value, want[name]) for name, value in found(y, backward).items())
            if error > TOLERANCE:
                raise ArithmeticError(f"a replay has error {error:.2g}")

        arms = [f"{self.NAME}, captured"]
        for phase, backward in PHASES.items():
            call = captured(partial(steps[self.NAME], backward), theirs.poison, partial(check, backward))
            if isinstance(call, str):
                gate.take({"bad": f"{key}/{arms[0]}", "why": f"{phase}: {call}"})
                return
            timers[f"{arms[0]}/{phase}"] = timer(call)
        if self.OURS == "symmetric":  # the all-to-all reads sizes on the host
            arms.append("symmetric, captured")
            for phase, backward in PHASES.items():
                timers[f"{arms[1]}/{phase}"] = timer(graph(partial(steps[self.OURS], backward)))
        times = times_of(timers, rounds)
        yield self._described(case, {arm: times[arm] for arm in arms})

    def exchange_case(self, case: Case, rounds: int, key: str, gate: Gate) -> Iterator[Arms]:
        """Of a peer whose exchange cannot run alone: nothing."""
        yield from ()

    def _described(self, case: Case, arms: Arms) -> Arms:
        return {arm: figures | (self.facts(case) if arm.startswith(self.NAME) else {}) for arm, figures in arms.items()}
