"""The fused projection and cross entropy against float64: values, every gradient, edges, chunks and ranks."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # before `poison`: it lists torch's functions at its import, and would not know a replaced one
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.loss import (
    cross_entropy_gradient_ref,
    cross_entropy_sums_ref,
    linear_cross_entropy,
)
from megablocks.ops.loss_triton import _SUMS_BLOCK, gradient_launch, sums_launch
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.syncs import no_sync
from megablocks.testing.tolerances import assert_as_exact_as, max_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = [torch.bfloat16, torch.float16]
H = 48
MANY = _SUMS_BLOCK + 904  # words: more than one block of a row
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int, words: int, dtype: torch.dtype, device: str = DEVICE) -> Inputs:
    """x, weight, labels and the incoming gradient. Labels are at both edges; some tokens are ignored or masked."""
    g = torch.Generator().manual_seed(tokens * 7919 + words)
    x, weight = torch.randn(tokens, H, generator=g), torch.randn(words, H, generator=g) / 4
    labels = torch.randint(words, (tokens,), generator=g)
    labels[0], labels[-1] = 0, words - 1
    labels[2::7] = -100
    labels[3::7] = words
    grad = torch.rand(tokens, generator=g)
    grad[5::6] = 0
    return x.to(device, dtype), weight.to(device, dtype), labels.to(device), grad.to(device)


def plain(x: Tensor, weight: Tensor, labels: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Loss, dx and dW by torch: the product in `dtype`, cross entropy in float32 or wider."""
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    logits = x @ weight.t()
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    known = torch.where((labels >= 0) & (labels < len(weight)), labels, -100)
    loss = F.cross_entropy(logits, known, reduction="none")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), grad.to(loss.dtype))


def fused(x: Tensor, weight: Tensor, labels: Tensor, grad: Tensor, **options: object) -> tuple[Tensor, ...]:
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    loss = linear_cross_entropy(x, weight, labels, **options)  # type: ignore[arg-type]
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), grad)


def check(found: tuple[Tensor, ...], given: Inputs, dtype: torch.dtype) -> None:
    truth = plain(*given, torch.float64)
    for result, torch_s, exact in zip(found, plain(*given, dtype), truth, strict=True):
        if dtype == torch.float32:
            assert max_error(result, exact) <= max(1e-6 * float(exact.abs().max()), max_error(torch_s, exact))
        else:
            assert_as_exact_as(result, torch_s, exact)


@pytest.mark.any_device
@pytest.mark.parametrize("words", [1, 101, 1000, MANY])
@pytest.mark.parametrize("tokens", [1, 13, 67])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_S2_values_and_gradients_equal_float64(tokens: int, words: int, dtype: torch.dtype, poison: None) -> None:
    given = inputs(tokens, words, dtype)
    found = fused(*given)
    check(found, given, dtype)
    labels = given[2]
    ignored = (labels < 0) | (labels >= words)
    assert not found[0][ignored].any() and not found[1][ignored | (given[3] == 0)].any()
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype


@pytest.mark.any_device
@pytest.mark.parametrize("rows", [1, 5, 13])
@pytest.mark.parametrize("kept", [0, 1, 99])
def test_S2_chunks_and_kept_logits_change_nothing(rows: int, kept: int, poison: None) -> None:
    given = inputs(13, 101, torch.float32)
    row_bytes = 101 * 4
    options = {"chunk_bytes": rows * row_bytes + 3, "keep_bytes": kept * rows * row_bytes}
    check(fused(*given, **options), given, torch.float32)


@pytest.mark.any_device
def test_S2_all_tokens_ignored_and_no_tokens(poison: None) -> None:
    x, weight, labels, grad = inputs(13, 101, torch.float32)
    for result in fused(x, weight, torch.full_like(labels, -1), grad):
        assert not result.any()
    for result in fused(x[:0], weight, labels[:0], grad[:0]):
        assert not result.any()


@pytest.mark.any_device
def test_S2_a_masked_token_gives_no_nan(poison: None) -> None:
    """Its logits overflow; its gradient is 0, where 0 times its softmax would be NaN."""
    x, weight, labels, grad = inputs(13, 101, torch.float32)
    x[1] = 1e38
    grad[1] = 0
    loss, dx, _ = fused(x, weight, labels, grad)
    others = torch.arange(13, device=DEVICE) != 1
    want = plain(x[others], weight, labels[others], grad[others], torch.float64)
    assert not dx[1].any() and not loss[others].isnan().any()
    assert max_error(dx[others], want[1]) <= 1e-6 * float(want[1].abs().max())


@pytest.mark.any_device
def test_S2_confident_and_far_logits(poison: None) -> None:
    """A loss near 0, logits near 1e4, and a word that is impossible."""
    logits = torch.tensor([[40.0, 0, 0], [1e4, 1e4 - 3, 0], [1.0, float("-inf"), 2.0], [float("-inf")] * 2 + [1.0]])
    logits, labels = logits.to(DEVICE), torch.tensor([0, 1, 2, 2], device=DEVICE)
    for sums in (sums_launch(logits, labels), cross_entropy_sums_ref(logits, labels)):
        loss = (sums[0] - sums[2]) + sums[1].log()
        want = F.cross_entropy(logits.double(), labels, reduction="none")
        assert max_error(loss, want) <= 1e-6


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("words", [1, 101, MANY])
def test_S2_kernels_equal_their_references(words: int, dtype: torch.dtype, poison: None) -> None:
    """On a machine without a GPU this runs the interpreter; the op itself takes the references there."""
    generator = torch.Generator().manual_seed(words)
    logits = torch.randn(13, words, generator=generator) * 4
    logits[::2, -1] += 20  # the maximum is in the last block of some rows, and in the first one of others
    logits[1::2, 0] += 20
    logits = logits.to(DEVICE, dtype)
    labels = torch.randint(-1, words + 1, (13,), generator=generator).to(DEVICE)
    grad = torch.rand(26, generator=generator).to(DEVICE)[::2]
    grad[4] = 0
    sums = sums_launch(logits, labels)
    torch.testing.assert_close(sums, cross_entropy_sums_ref(logits, labels), rtol=1e-6, atol=0)
    want = cross_entropy_gradient_ref(logits.double(), labels, sums[0].double(), sums[1].double(), grad.double())
    gradient_launch(logits, labels, sums[0], sums[1], grad)
    torch.testing.assert_close(logits.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.any_device
def test_N5_second_backward_frozen_inputs_and_autocast(poison: None) -> None:
    x, weight, labels, grad = inputs(13, 101, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, labels)
    first = torch.autograd.grad(loss, (x, weight), grad, retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight), grad)
    assert all(map(torch.equal, first, second))
    for kept, other, place in ((x, weight, 0), (weight, x, 1)):
        other.requires_grad_(False)
        (alone,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels), kept, grad)
        assert torch.equal(alone, first[place])
        other.requires_grad_()
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, labels), loss)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels)
        dx, dw = torch.autograd.grad(loss, (x, weight), grad)
    half = x.detach().bfloat16(), weight.detach().bfloat16(), labels, grad
    assert torch.equal(loss, fused(*half)[0]) and dx.dtype == dw.dtype == torch.float32
    assert torch.equal(dx, fused(*half)[1].float())
    again = torch.utils.checkpoint.checkpoint(linear_cross_entropy, x, weight, labels, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, (x, weight), grad), first))
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_S2_the_weights_gradient_is_added_to_main_grad(dtype: torch.dtype, poison: None) -> None:
    x, weight, labels, grad = inputs(67, 101, dtype)
    want, already = plain(x, weight, labels, grad, torch.float64)[2], torch.ones(101, H, device=DEVICE)
    main_grad = already.clone()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, labels, main_grad=main_grad, chunk_bytes=20 * 101 * x.element_size())
    loss.backward(grad)
    assert weight.grad is None
    assert_as_exact_as(main_grad - already, plain(x, weight, labels, grad, dtype)[2], want)


def test_N9_compiles_in_one_graph() -> None:
    x, weight, labels, grad = inputs(13, 101, torch.float32, "cpu")
    x.requires_grad_()
    weight.requires_grad_()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, weight, labels), (x, weight), grad)
    want = torch.autograd.grad(linear_cross_entropy(x, weight, labels), (x, weight), grad)
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(101, H + 1)}, "weight is"),
        ({"weight": torch.zeros(101, H, dtype=torch.bfloat16)}, "weight is"),
        ({"labels": torch.zeros(12, dtype=torch.int64)}, "labels are"),
        ({"labels": torch.zeros(13, dtype=torch.int32)}, "labels are"),
        ({"main_grad": torch.zeros(101, H, dtype=torch.bfloat16)}, "main_grad is"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Tensor], message: str) -> None:
    x, weight, labels, _ = inputs(13, 101, torch.float32, "cpu")
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**({"x": x, "weight": weight, "labels": labels} | change))


def _on_a_rank(dtype: torch.dtype, words: int) -> list[Tensor]:
    """Loss, the sum of the ranks' dx, and dW of this rank's words, with tensors of the whole vocabulary."""
    x, weight, labels, grad = inputs(13, words, dtype, "cpu")
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()]
    loss, dx, dw = fused(x, mine, labels, grad, group=dist.group.WORLD, chunk_bytes=5 * len(mine) * 4)
    dist.all_reduce(dx)
    return [loss, dx, dw]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_S2_a_vocabulary_over_two_ranks_equals_one(dtype: torch.dtype) -> None:
    words = 202
    ranks = run_distributed_test(_on_a_rank, 2, dtype, words)
    given = inputs(13, words, dtype, "cpu")
    for loss, dx, _ in ranks:
        check((loss, dx, torch.cat([dw for *_, dw in ranks])), given, dtype)


@pytest.mark.gpu
def test_S2_no_logits_of_all_tokens_in_float32_on_a_gpu() -> None:
    """Beside inputs and their gradients: a chunk, and what is kept."""
    tokens, words, hidden = 16384, 32768, 256
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(words, (tokens,), device="cuda")
    for keep_bytes, limit in ((0, 2**28), (2**29, 2**28 + 2**29)):
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, labels, chunk_bytes=2**27, keep_bytes=keep_bytes).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < limit + 4 * words * hidden * 2 + 4 * tokens * hidden


@pytest.mark.gpu
def test_S2_no_read_from_the_gpu() -> None:
    x, weight, labels, grad = inputs(67, MANY, torch.bfloat16)
    fused(x, weight, labels, grad)
    with no_sync():
        fused(x, weight, labels, grad, keep_bytes=0, chunk_bytes=20 * MANY * 2)


@pytest.mark.gpu
def test_S2_a_captured_call_equals_the_eager_one() -> None:
    x, weight, labels, grad = inputs(67, MANY, torch.bfloat16)
    fused(x, weight, labels, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(x, weight, labels, grad)
    for seed in range(2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert all(map(torch.equal, found, fused(x, weight, labels, grad)))
