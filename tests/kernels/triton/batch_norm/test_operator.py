"""The batch norm operators: registration, the compiler, what is saved, and that nothing depends on the run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from normmatters.functional import lp_batch_norm
from normmatters.kernels.triton.batch_norm import operator  # noqa: F401 (registers the operators)
from normmatters.nn.batchnorm import L1BatchNorm2d, MeanOnlyBatchNorm2d, TopKBatchNorm2d
from normmatters.norm import Norm
from support import called
from support.batch_norm_cases import DEVICE, EPS, KINDS, LAYOUTS, affine, check, fused, made

SHAPE = (5, 3, 2, 3)

# The operators -------------------------------------------------------------------------------------------------------


def constant_of(kind: str, n: int = 30) -> float:
    p, k = KINDS[kind]
    return Norm(p, k).scale_constant(n)


def forward_arguments(
    kind: str, relu: bool, with_residual: bool, lean: bool, layout: str, linked: bool = False, running: bool = True
) -> tuple:
    buffers = [torch.rand(3, device=DEVICE) for _ in range(2)] if running else [None, None]
    tensors = [made(SHAPE, layout), *affine(kind, 3).values(), made(SHAPE, layout) if with_residual else None]
    for t in tensors:
        if t is not None:
            t.requires_grad_()
    link = None
    if linked and with_residual:
        tensors[-1], link = tensors[-1].detach(), torch.zeros(1, device=DEVICE).expand(SHAPE).requires_grad_()
    statistic = (0.3, kind, KINDS[kind][1] or 0, constant_of(kind), EPS)
    batches = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return (*tensors, link, *buffers, batches, *statistic, relu, lean, True, linked)


CASES = [
    ("l1", True, False, False, "channels_last"),
    ("range", True, False, False, "contiguous", False, False),
    ("l1", True, False, True, "contiguous"),
    ("l1", True, True, True, "channels_last"),
    ("l1", False, False, True, "contiguous"),
    ("topk", True, True, False, "contiguous"),
    ("l2", False, True, False, "channels_last"),
    ("mean", True, False, False, "contiguous"),
    ("l1", True, True, True, "channels_last", True),
    ("l1", False, True, False, "contiguous", True),
    ("topk", True, False, False, "channels_last", True),
]
# Under "auto_dynamic" sizes would be symbols; the kernels are specialized to them, as the operators say.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_forward(case):
    torch.library.opcheck(torch.ops.normmatters.batch_norm_forward, forward_arguments(*case), test_utils=CHECKS)


def test_opcheck_forward_that_saves_nothing():
    *arguments, _, _ = forward_arguments("l1", True, False, False, "contiguous")
    arguments = [t.detach() if isinstance(t, Tensor) else t for t in (*arguments, False, False)]
    torch.library.opcheck(torch.ops.normmatters.batch_norm_forward, arguments, test_utils=CHECKS)
    z, link, code, count, *_ = torch.ops.normmatters.batch_norm_forward(*arguments)
    assert (z.shape, *(t.numel() for t in (code, count, link))) == (SHAPE, 0, 0, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_backward(case):
    kind, relu, with_residual, lean, layout, *linked = case
    x, weight, bias, *_ = arguments = forward_arguments(*case)
    with torch.no_grad():
        z, _, code, count, statistics, index = torch.ops.normmatters.batch_norm_forward(*arguments)
    weight, bias = (None if t is None else t.detach() for t in (weight, bias))
    arguments = (
        made(SHAPE, layout), made(SHAPE, layout) if any(linked) else None,
        z if lean else x.detach(), code, count, statistics, index, weight, bias, kind,
        Norm(*KINDS[kind]).selected, relu, with_residual, lean, constant_of(kind), with_residual,
        layout == "channels_last",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.normmatters.batch_norm_backward, arguments, test_utils=CHECKS)


# The compiler --------------------------------------------------------------------------------------------------------

NORMS = {
    "l1": lambda: L1BatchNorm2d(3, act="relu"),
    "l1 lean": lambda: L1BatchNorm2d(3, act="relu", memory="lean"),
    "topk": lambda: TopKBatchNorm2d(3, k=3, act="relu"),
    "mean": lambda: MeanOnlyBatchNorm2d(3),
}


def step(norm: nn.Module, function, x: Tensor, residual: Tensor | None, g: Tensor) -> list[Tensor]:
    """The output, all gradients and all buffers after one step."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, residual) if t is not None]
    norm.zero_grad()
    y = function(*inputs)
    y.backward(g)
    return [y.detach(), *(t.grad for t in (*inputs, *norm.parameters())), *(b.clone() for b in norm.buffers())]


@pytest.mark.parametrize(
    ("name", "with_residual"), [("l1", False), ("l1 lean", False), ("l1 lean", True), ("topk", True), ("mean", True)]
)
def test_compiled_is_eager(name, with_residual):
    torch.compiler.reset()
    norm = NORMS[name]().to(DEVICE)
    twin = copy.deepcopy(norm)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for layout in LAYOUTS:  # and a second step, from moved statistics
        x, g = made((6, 3, 4, 5), layout), torch.randn(6, 3, 4, 5, device=DEVICE)
        residual = made((6, 3, 4, 5), layout) if with_residual else None
        for mine, reference in zip(step(twin, compiled, x, residual, g), step(norm, norm, x, residual, g)):
            assert torch.equal(mine, reference)
            assert mine.stride() == reference.stride()


def test_compiled_goes_through_the_operators():
    """Otherwise the test above would compare the equation with itself."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    torch.compile(L1BatchNorm2d(3).to(DEVICE), fullgraph=True, backend=backend)(made(SHAPE))
    assert [name for name in seen if "normmatters" in name] == ["normmatters.batch_norm_forward"]


# What is saved -------------------------------------------------------------------------------------------------------


def saved_tensors(function, *arguments) -> tuple[Tensor, list[Tensor]]:
    """The output, and the tensors that the backward pass keeps beside it, its parameters and the residual."""
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = function(*arguments)
    return y, packed


def kept_bytes(y: Tensor, packed: list[Tensor], but: tuple[Tensor | None, ...] = ()) -> int:
    known = {t.untyped_storage().data_ptr() for t in (y, *but) if t is not None}
    unique = {t.untyped_storage().data_ptr(): t for t in packed}
    return sum(t.untyped_storage().nbytes() for at, t in unique.items() if at not in known)


@pytest.mark.parametrize(
    ("memory", "act", "with_residual", "share"),
    [
        ("lean", "relu", False, 0.125),
        ("lean", "relu", True, 0.25),
        ("lean", None, False, 0.25),
        ("exact", "relu", False, 1.125),
        ("exact", None, False, 1.125),
    ],
)
def test_saved_bytes(memory, act, with_residual, share):
    """Bits for each element, then one number for each channel and program: those count little in a large tensor."""
    x = made((32, 4, 8, 16), "channels_last", torch.float16).requires_grad_()
    weight, bias = (t.requires_grad_() for t in affine("l1", 4).values())
    residual = made((32, 4, 8, 16), "channels_last", torch.float16).requires_grad_() if with_residual else None
    y, packed = saved_tensors(
        lambda: called.batch_norm(
            x, None, None, weight, bias, True, 0.1, EPS, p=1, act=act, residual=residual, memory=memory
        )
    )
    size = x.numel() * 2
    kept = kept_bytes(y, packed, (weight, bias))
    assert share * size <= kept <= share * size + 0.02 * size
    if memory == "lean":
        pointers = {t.untyped_storage().data_ptr() for t in packed}
        assert x.untyped_storage().data_ptr() not in pointers
        if residual is not None:
            assert residual.untyped_storage().data_ptr() not in pointers
            assert y.untyped_storage().data_ptr() not in pointers


#: ResNet-50's norms at batch 256: channels, pixels, and how many of them.
RESNET50 = [
    (64, 112, 1), (64, 56, 6), (256, 56, 4), (128, 56, 1), (128, 28, 7), (512, 28, 5), (256, 28, 1), (256, 14, 11),
    (1024, 14, 7), (512, 14, 1), (512, 7, 5), (2048, 7, 4),
]  # fmt: skip


def kept_by_layer(channels: int, pixels: int, with_residual: bool) -> tuple[int, int]:
    """What the backward pass keeps beside the output, and the output's size; by the operator, on meta tensors."""
    x = torch.empty(256, channels, pixels, pixels, dtype=torch.float16, device="meta")
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    residual = x.detach() if with_residual else None
    weight, bias = (torch.empty(channels, device="meta", requires_grad=True) for _ in range(2))
    (y, *_), packed = saved_tensors(
        lambda: torch.ops.normmatters.batch_norm_forward(
            x, weight, bias, residual, None, None, None, None, 0.1, "l1", 0, 1.25, EPS, True, True, True, False
        )
    )
    assert sum(t.shape == y.shape for t in packed) == (0 if with_residual else 1)  # the output
    return sum(t.nbytes for t in packed if t.shape != y.shape), y.nbytes


@pytest.mark.parametrize(("with_residual", "bits", "most"), [(False, 0.125, 0.13), (True, 0.25, 0.3)])
def test_saved_bytes_of_a_real_network(with_residual, bits, most):
    """At most 0.13 of the inputs for BN + ReLU and 0.3 with a residual."""
    kept = total = 0
    for channels, pixels, count in RESNET50:
        mine, size = kept_by_layer(channels, pixels, with_residual)
        assert bits * size <= mine <= (most + 0.002) * size, (channels, pixels)
        kept, total = kept + count * mine, total + count * size
    assert kept <= most * total


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_saved_without_grad(kind):
    p, k = KINDS[kind]
    x = made(SHAPE)
    with torch.no_grad():
        y, packed = saved_tensors(
            lambda: called.batch_norm(x.requires_grad_(), None, None, None, None, True, 0.1, EPS, p=p, k=k)
        )
    assert packed == []
    assert not y.requires_grad
    expected = lp_batch_norm(x.detach().double(), training=True, eps=EPS, p=p, k=k)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


# Nothing depends on the run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "memory"), [*((kind, "exact") for kind in KINDS), ("l1", "lean")])
def test_bitwise_equal_from_run_to_run(kind, memory):
    x, g, parameters = made((9, 3, 4, 5)), torch.randn(9, 3, 4, 5, device=DEVICE), affine(kind, 3)
    first, second = (fused(x, *parameters.values(), None, g, kind, "relu", memory) for _ in range(2))
    for name, value in vars(first).items():
        assert value is None or torch.equal(value, getattr(second, name)), name


def test_no_gradient_for_what_needs_none():
    x, residual = made(SHAPE), made(SHAPE)
    weight = torch.rand(3, device=DEVICE, requires_grad=True)
    y = called.batch_norm(x, None, None, weight, None, True, 0.1, EPS, p=1, residual=residual, act="relu")
    y.sum().backward()
    expected = lp_batch_norm(x.double(), training=True, eps=EPS)
    opened = (expected * weight.double().view(1, -1, 1, 1) + residual > 0).double()
    torch.testing.assert_close(weight.grad.double(), (opened * expected).sum((0, 2, 3)).detach(), rtol=0, atol=1e-4)
    assert x.grad is None
    assert residual.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_activation_checkpointing_counts_the_batch_once(memory, use_reentrant):
    norm = L1BatchNorm2d(3, act="relu", memory=memory).to(DEVICE)
    twin = copy.deepcopy(norm)
    x, g = made(SHAPE), torch.randn(SHAPE, device=DEVICE)
    mine = step(twin, lambda x: checkpoint(twin, x, use_reentrant=use_reentrant), x, None, g)
    for ours, reference in zip(mine, step(norm, norm, x, None, g)):
        assert torch.equal(ours, reference)


def test_one_norm_twice_in_one_step():
    norm = L1BatchNorm2d(3, act="relu").to(DEVICE)
    x = made(SHAPE).requires_grad_()
    y = norm(norm(x))
    y.backward(torch.ones_like(y))
    reference = x.detach().double().requires_grad_()
    weight, bias = (t.detach().double().requires_grad_() for t in (norm.weight, norm.bias))
    buffers = [torch.zeros(3, dtype=torch.float64, device=DEVICE), torch.ones(3, dtype=torch.float64, device=DEVICE)]
    z = reference
    for _ in range(2):
        z = lp_batch_norm(z, *buffers, weight, bias, True, act="relu")
    z.backward(torch.ones_like(z))
    pairs = [(y, z), (x.grad, reference.grad), (norm.weight.grad, weight.grad), (norm.bias.grad, bias.grad)]
    for mine, expected in [*pairs, (norm.running_mean, buffers[0]), (norm.running_var, buffers[1])]:
        torch.testing.assert_close(mine.detach().double(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_the_output_may_not_be_changed_in_place_when_it_is_what_was_saved():
    x = made(SHAPE).requires_grad_()
    y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=1, act="relu", memory="lean")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    x = made(SHAPE).requires_grad_()
    y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=1)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        dx.sum().backward()


def test_operator_and_eager_node_agree():
    """The compiler's way, called as it is, gives what the eager node gives."""
    case = ("l1", True, True, True, "channels_last")
    x, weight, bias, residual, *rest = forward_arguments(*case)
    g = torch.randn(SHAPE, device=DEVICE)
    z, *_ = torch.ops.normmatters.batch_norm_forward(x, weight, bias, residual, *rest)
    z.backward(g)
    ours = fused(x, weight, bias, residual, g, "l1", "relu", "lean")
    assert torch.equal(ours.y, z)
    for mine, tensor in zip((ours.dx, ours.dweight, ours.dbias, ours.dresidual), (x, weight, bias, residual)):
        assert torch.equal(mine, tensor.grad)
    check(x.detach(), "l1", weight=weight.detach(), bias=bias.detach(), residual=residual.detach(), act="relu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "memory", "act"),
    [
        ("l1", "lean", "relu"),
        ("l1", "exact", "relu"),
        ("l1", "lean", None),
        ("l2", "exact", "relu"),
        ("topk", "exact", None),
    ],
)
def test_links_give_the_gradients_that_sums_give(kind, memory, act, layout):
    """Three norms whose outputs are residuals of the next: linked or not, all that is learned is the same."""

    def gradients(linked):
        x = made_once.detach().requires_grad_()
        leaves = [x, *(t.detach().requires_grad_() for t in parameters)]
        link, residual, z = None, None, x
        for weight, bias in zip(leaves[1::2], leaves[2::2]):
            z, link = called.linked_batch_norm(
                z * 1.5, None, None, weight, bias, True, 0.1, EPS,
                p=p, k=k, act=act, residual=residual, memory=memory, link=link, linked=linked,
            )  # fmt: skip
            residual = z
            assert (link is not None) == linked
        (z * g).sum().backward()
        return z, [t.grad for t in leaves]

    p, k = KINDS[kind]
    made_once, g = made(SHAPE, layout), made(SHAPE, layout)
    parameters = [t for _ in range(3) for t in affine(kind, SHAPE[1]).values()]
    expected, sums = gradients(False)
    y, ours = gradients(True)
    assert torch.equal(y, expected)
    for mine, theirs in zip(ours, sums):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_link_is_one_number_in_memory():
    x = made(SHAPE).requires_grad_()
    z, link = called.linked_batch_norm(x, None, None, None, None, True, 0.1, EPS, act="relu", linked=True)
    assert link.shape == z.shape
    assert link.untyped_storage().nbytes() == z.element_size()
    assert called.linked_batch_norm(x.detach(), None, None, None, None, True, 0.1, EPS, linked=True)[1] is None
