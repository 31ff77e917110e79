"""FusedAdam against torch's in float64, its state beside torch's, and the sum of squares; kernels and reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megablocks.ops import adam
from megablocks.ops.adam import CHUNK, FusedAdam, Tables, square_sum
from megablocks.ops.launch import interpreted
from megablocks.testing.syncs import no_sync

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1,), (13,), (0,), (16,), (3, 67), (CHUNK + 1000,), (2, CHUNK)]
GAP = 3
SENTINEL = 7.0


@pytest.fixture(params=["kernel", "reference"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(adam, "runs_triton", lambda t: request.param == "kernel" and t.dtype != torch.float64)
    return request.param


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "runs_triton", lambda t: t.dtype != torch.float64)


def spread(shapes: list[tuple[int, ...]], value: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """A buffer of SENTINEL, and views of these shapes in it between gaps. Only some of them are aligned."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.full((sum(sizes) + GAP * (len(sizes) + 1),), SENTINEL, device=DEVICE)
    views, at = [], GAP
    for size, shape in zip(sizes, shapes, strict=True):
        views.append(buffer[at : at + size].fill_(value).view(shape))
        at += size + GAP
    return buffer, views


def draw(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(DEVICE)


def groups(parameters: list[Tensor]) -> list[dict]:
    """Two groups, of which one takes Megatron's options for biases."""
    return [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-5},
    ]


def torchs(kind: str) -> Callable[..., torch.optim.Adam]:
    return torch.optim.AdamW if kind == "decoupled" else torch.optim.Adam


def rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # Triton's interpreter truncates
        return (p.view(torch.int32) >> 16 << 16).view(torch.float32).to(dtype)
    return p.to(dtype)


def check_near(got: Tensor, want: Tensor, name: str) -> None:
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30)) if want.numel() else 0.0
    assert error <= 1e-6, f"{name}: relative error {error:.1e}"


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["decoupled", "l2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_S3_steps_equal_torchs_in_float64(path: str, kind: str, dtype: torch.dtype | None) -> None:
    if path == "reference" and dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("only the interpreter truncates")
    buffer, parameters = spread(SIZES)
    for seed, p in enumerate(parameters):
        p.copy_(draw(p.shape, seed))
    copies = [] if dtype is None else [torch.full_like(p, torch.nan, dtype=dtype) for p in parameters]
    wanted = [p.double() for p in parameters]
    ours = FusedAdam(groups(parameters), lr=1e-2, decoupled_weight_decay=kind == "decoupled")
    ours.copies = dict(zip(parameters, copies, strict=False))
    theirs = torchs(kind)(groups(wanted), lr=1e-2, foreach=False)
    _, grads = spread(SIZES)
    for step, scale in enumerate((None, 0.3, 1.0, 1e-4)):
        for i, (p, want, grad) in enumerate(zip(parameters, wanted, grads, strict=True)):
            p.grad = grad.copy_(draw(p.shape, 100 * step + i))
            want.grad = grad.double() * (scale or 1.0)
        if scale is not None:
            ours.grad_scale = torch.tensor(scale, device=DEVICE)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.step()
        for i, grad in enumerate(grads):
            assert torch.equal(grad, draw(grad.shape, 100 * step + i)), "the gradient was written to"
    for i, (p, want) in enumerate(zip(parameters, wanted, strict=True)):
        check_near(p, want, f"parameter {i}")
        for name in ("exp_avg", "exp_avg_sq"):
            check_near(ours.state[p][name], theirs.state[want][name], f"{name} {i}")
        assert float(ours.state[p]["step"]) == 4
        if copies:
            assert torch.equal(copies[i], rounded(p, copies[i].dtype))
    inside = sum(p.numel() for p in parameters if (p == SENTINEL).any())
    assert inside == 0 and int((buffer == SENTINEL).sum()) == GAP * (len(SIZES) + 1), "a gap was written to"


@pytest.mark.any_device
def test_S3_a_scale_that_is_nan_changes_nothing(path: str) -> None:
    _, parameters = spread(SIZES)
    for seed, p in enumerate(parameters):
        p.copy_(draw(p.shape, seed))
        p.grad = draw(p.shape, 100 + seed)
    ours = FusedAdam(groups(parameters), lr=1e-2)
    ours.step()
    kept = [t.clone() for p in parameters for t in (p, ours.state[p]["exp_avg"], ours.state[p]["exp_avg_sq"])]
    for p in parameters:
        p.grad = torch.full_like(p, torch.nan)
    ours.grad_scale = torch.tensor(torch.nan, device=DEVICE)
    ours.step()
    now = [t for p in parameters for t in (p, ours.state[p]["exp_avg"], ours.state[p]["exp_avg_sq"])]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["decoupled", "l2"])
@pytest.mark.parametrize("first", ["ours", "torch's"])
def test_S3_state_is_torchs(kernel: None, kind: str, first: str) -> None:
    """Two steps by one optimizer, its state into the other, two steps by both."""

    def make(name: str) -> tuple[list[Tensor], torch.optim.Adam]:
        parameters = [draw(torch.Size(shape), i) for i, shape in enumerate(SIZES)]
        if name == "ours":
            return parameters, FusedAdam(groups(parameters), lr=1e-2, decoupled_weight_decay=kind == "decoupled")
        return parameters, torchs(kind)(groups(parameters), lr=1e-2)

    def step(parameters: list[Tensor], optimizer: torch.optim.Adam, seed: int) -> None:
        for i, p in enumerate(parameters):
            p.grad = draw(p.shape, 10 * seed + i)
        optimizer.step()

    parameters, one = make(first)
    for seed in range(2):
        step(parameters, one, seed)
    others, other = make("torch's" if first == "ours" else "ours")
    for p, q in zip(parameters, others, strict=True):
        q.copy_(p)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.param_groups[1]["betas"] == (0.8, 0.95)
    for seed in (2, 3):
        step(parameters, one, seed)
        step(others, other, seed)
    for i, (p, q) in enumerate(zip(parameters, others, strict=True)):
        check_near(q, p.double(), f"parameter {i}")
        assert float(other.state[q]["step"]) == 4 and other.state[q]["step"].device.type == "cpu"


def test_S3_what_a_checkpoint_says_of_the_kind_does_not_count(kernel: None) -> None:
    """A state of torch's Adam, capturable, into AdamW; and Megatron's empty state, which has no step."""
    p = draw(torch.Size((16,)), 0)
    ours = FusedAdam([p], lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
    theirs = torch.optim.Adam([p.clone()], lr=1e-2, weight_decay=0.1, maximize=True)
    state = theirs.state_dict()
    state["state"] = {0: {"exp_avg": torch.zeros(16), "exp_avg_sq": torch.zeros(16)}}
    ours.load_state_dict(state)
    group = ours.param_groups[0]
    assert group["decoupled_weight_decay"] and not group["maximize"] and float(ours.state[p]["step"]) == 0
    assert isinstance(copy.deepcopy(ours), FusedAdam)
    with pytest.raises(ValueError, match="amsgrad=True: must be False"):
        FusedAdam([p], amsgrad=True)
    with pytest.raises(ValueError, match="closure"):
        ours.step(lambda: None)


@pytest.mark.any_device
def test_S3_moved_tensors_are_found(kernel: None) -> None:
    """Parameters, gradients, state and copies move to other addresses between two steps."""
    p = torch.nn.Parameter(draw(torch.Size((CHUNK + 16,)), 0))
    want = p.detach().double()
    ours, theirs = FusedAdam([p], lr=1e-2), torch.optim.Adam([want], lr=1e-2)
    model = torch.zeros_like(p, dtype=torch.float16, requires_grad=False)
    ours.copies = {p: model}
    for step in range(3):
        p.grad = draw(p.shape, step + 1)
        want.grad = p.grad.double()
        before = p.data_ptr(), model.data_ptr()
        kept = p.data, model.data  # so that the addresses differ
        p.data, model.data = p.data.clone(), torch.full_like(model, torch.nan)
        if step:
            ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"].clone()
        assert before != (p.data_ptr(), model.data_ptr()) and len(kept) == 2
        ours.step()
        theirs.step()
        check_near(p.detach(), want, f"step {step}")
        assert torch.equal(model, p.detach().half())


@pytest.mark.any_device
def test_S3_a_parameter_without_a_gradient_stays(kernel: None) -> None:
    """It is left alone, and counts its own steps when it gets one later."""
    parameters = [draw(torch.Size((n,)), n) for n in (16, 20)]
    wanted = [p.double() for p in parameters]
    ours, theirs = FusedAdam(parameters, lr=1e-2), torch.optim.Adam(wanted, lr=1e-2)
    for step in range(3):
        for i, (p, want) in enumerate(zip(parameters, wanted, strict=True)):
            p.grad = draw(p.shape, step) if i == 0 or step > 1 else None
            want.grad = None if p.grad is None else p.grad.double()
        ours.step()
        theirs.step()
        for i, (p, want) in enumerate(zip(parameters, wanted, strict=True)):
            check_near(p, want, f"parameter {i} after step {step}")
    assert [float(ours.state[p]["step"]) for p in parameters] == [3, 1]


def test_S3_step_counts_that_are_taken_over_move_to_the_host() -> None:
    """torch's fused Adam keeps them on the parameter's device, and there each step would read each of them."""
    parameters = [torch.nn.Parameter(draw(torch.Size((8,)), seed)) for seed in range(2)]
    theirs = torch.optim.AdamW(parameters, fused=True)
    parameters[0].grad = torch.ones_like(parameters[0])
    theirs.step()
    state = theirs.state[parameters[0]]
    state["step"] = state["step"].double()  # without a GPU only the dtype can show that it is converted
    theirs.state[parameters[1]] = {}
    ours = FusedAdam.of(theirs)
    step = ours.state[parameters[0]]["step"]
    assert (step.device.type, step.dtype, float(step)) == ("cpu", torch.float32, 1)
    ours.step()
    assert float(step) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_S3_a_gradient_scaler_divides_by_its_scale(fused: bool) -> None:
    steps = []
    for kind, options in ((torch.optim.Adam, {}), (FusedAdam, {"fused": fused})):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = kind([p], lr=0.1, eps=1.0, **options), torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(p.square().sum()).backward()
        scaler.step(optimizer)
        steps.append(p.detach())
    assert torch.allclose(*steps)


@pytest.mark.parametrize("name", adam.UNSUPPORTED)
def test_what_a_step_would_ignore_is_refused_of_a_group_too(name: str) -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(3))], name: True}
    with pytest.raises(ValueError, match=f"^{name}=True: must be False with FusedAdam"):
        FusedAdam([group])
    with pytest.raises(ValueError, match=f"^{name}=True: must be False with FusedAdam"):
        FusedAdam.of(torch.optim.AdamW([group]))
    ours = FusedAdam([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=f"^{name}=True: must be False with FusedAdam"):
        ours.add_param_group(group)
    assert len(ours.param_groups) == 1, "a caller who catches the error goes on without the group"


@pytest.mark.any_device
def test_S3_tensors_that_no_kernel_takes_use_the_reference(kernel: None) -> None:
    wide = draw(torch.Size((6, 8)), 0)
    parameters = [wide.t(), wide.double() + 1, draw(torch.Size((16,)), 1)]
    wanted = [p.double() for p in parameters]
    ours, theirs = FusedAdam(parameters, lr=1e-2), torch.optim.Adam(wanted, lr=1e-2)
    for p, want in zip(parameters, wanted, strict=True):
        p.grad = torch.ones_like(p)
        want.grad = p.grad.double()
    ours.step()
    theirs.step()
    for i, (p, want) in enumerate(zip(parameters, wanted, strict=True)):
        check_near(p, want, f"parameter {i}")


@pytest.mark.any_device
def test_S3_square_sum(path: str, poison: None) -> None:
    _, tensors = spread(SIZES)
    for seed, t in enumerate(tensors):
        t.copy_(draw(t.shape, seed))
    tensors += [draw(torch.Size((40,)), 9), draw(torch.Size((6, 8)), 10).t(), torch.ones(3, dtype=torch.float64)]
    tensors[-1] = tensors[-1].to(DEVICE)
    tables = Tables()
    for _ in range(2):
        want = sum(float(t.double().square().sum()) for t in tensors)
        got = square_sum(tensors, DEVICE, tables)
        assert got.dtype == torch.float64 and got.shape == () and float(got) == pytest.approx(want, rel=1e-7)
        assert torch.equal(got, square_sum(tensors, DEVICE))
        tensors[0].mul_(5)
    assert float(square_sum([], DEVICE)) == 0
    tensors[4].view(-1)[0] = torch.nan
    assert square_sum(tensors, DEVICE, tables).isnan()


def test_the_interpreter_runs_these_kernels_without_a_gpu() -> None:
    assert torch.cuda.is_available() or interpreted()


@pytest.mark.gpu
def test_S3_a_step_does_not_wait_for_the_gpu() -> None:
    parameters = [draw(torch.Size(shape), i) for i, shape in enumerate(SIZES)]
    ours, tables = FusedAdam(groups(parameters), lr=1e-2), Tables()
    for step in range(4):
        for i, p in enumerate(parameters):
            p.grad = draw(p.shape, i + step)  # at new addresses
        torch.cuda.synchronize()
        with no_sync() if step else contextlib.nullcontext():
            norm = square_sum([p.grad for p in parameters], DEVICE, tables).sqrt()
            ours.grad_scale = torch.where(norm > 1, 1 / norm, 1.0).float()
            ours.step()


@pytest.mark.gpu
def test_S3_a_captured_step_equals_the_eager_one() -> None:
    shape = torch.Size((3 * CHUNK + 64,))
    runs = []
    for captured in (False, True):
        p, grad = draw(shape, 0), torch.empty(shape, device=DEVICE)
        model, p.grad = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16), grad
        ours = FusedAdam([p], lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
        ours.copies, graph = {p: model}, None
        for step in range(5):
            grad.copy_(draw(shape, step + 1))
            ours.param_groups[0]["lr"] = 1e-2 / (step + 1)
            if not captured or step == 0:
                ours.step()
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    ours.step()
            ours.prepare()
            graph.replay()
        runs.append((p, model, ours.state[p]["exp_avg_sq"]))
    for eager, replayed in zip(*runs, strict=True):
        assert torch.equal(eager, replayed)


@pytest.mark.gpu
def test_N4_adam_beyond_int32() -> None:
    """One parameter of more than 2³¹ elements; its first and last elements and those around 2³¹ against float64."""
    size = 2**31 + 3 * CHUNK + 16
    p, grad, model = (torch.zeros(size, device=DEVICE, dtype=d) for d in (torch.float32, torch.float32, torch.bfloat16))
    places = [slice(0, 4096), slice(2**31 - 2048, 2**31 + 2048), slice(size - 4096, size)]
    wanted = [draw(torch.Size((4096,)), i).double() for i in range(3)]
    for place, want in zip(places, wanted, strict=True):
        p[place] = want.float()
        want.copy_(p[place])
    p.grad = grad
    ours = FusedAdam([p], lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
    theirs = torch.optim.AdamW(wanted, lr=1e-2, weight_decay=0.1)
    ours.copies = {p: model}
    total = 0.0
    for step in range(2):
        for i, (place, want) in enumerate(zip(places, wanted, strict=True)):
            grad[place] = draw(torch.Size((4096,)), 10 * step + i)
            want.grad = grad[place].double()
        total = sum(float(want.grad.square().sum()) for want in wanted)
        ours.step()
        theirs.step()
    for place, want in zip(places, wanted, strict=True):
        check_near(p[place], want, str(place))
        assert torch.equal(model[place], p[place].bfloat16())
    assert float(square_sum([grad], DEVICE)) == pytest.approx(total, rel=1e-7)
