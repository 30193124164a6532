"""Blocks of one norm each: the forms in which a ReLU can follow it, and what a rewritten forward could get wrong."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A norm, what a subclass does behind it, and the parts to do it with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU()
        self.flag = False
        self.count = 0
        self.seen: list[Any] = []
        self.scale = nn.Parameter(torch.full((3, 1, 1), 0.5))
        self.register_buffer("steps", torch.zeros(()))


class ReluMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu_()


class TorchRelu(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class MethodAdd(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)).add_(x))


class ResidualLeft(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.add(x, self.bn(self.conv(x))))


class Broadcast(Block):
    """The add broadcasts: the fused operation would refuse, so the block falls back at run time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + self.scale)


class BroadcastUp(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x).mean((2, 3), keepdim=True)) + x)


class ResidualIsFused(Block):
    """The residual of one norm is the ReLU that another norm takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        r = F.relu(self.first(x))
        return F.relu(self.bn(self.conv(r)) + r)


class TupleOutput(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = F.relu(self.bn(self.conv(x)))
        return out, x * 2


class Alias(Block):
    """`z` is another name of `out`, so it sees the in-place add."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.conv(x))) * 2
        z = out
        out += x
        return out + z


class UsedTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return self.relu(out) + out


class AddUsedTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x)) + x
        return self.relu(out) + out


class Relu6(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.bn(self.conv(x)))


class CalledTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.relu(self.bn(x))))


class Alpha(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(torch.add(self.bn(self.conv(x)), x, alpha=2))


class AddNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + 0.1)


class AddItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return self.relu(out + out)


class TwoAdds(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x + x)


class IntoResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        r = x * 2
        r += self.bn(self.conv(x))
        return self.relu(r)


class Unused(Block):
    """Its statistics alone are wanted."""

    def forward(self, x: Tensor) -> Tensor:
        self.bn(x)
        return self.relu(self.conv(x))


class ViewChangedBeforeAdd(Block):
    """Changes what the norm has read: autograd refuses to go back through it, but without gradients it is right."""

    def forward(self, x: Tensor) -> Tensor:
        read = self.conv(x)
        part = read[:, :1]
        out = self.bn(read)
        part.mul_(2)
        return self.relu(out + x)


class InputUsedBeforeAdd(Block):
    """The other use of the input could write into it; whether it does is not known."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(x)
        return self.relu(out + self.conv(x))


class EvalOnly(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return out if self.training else self.relu(out)


class DataDependent(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.conv(x)))
        return out if x.sum() > 0 else 2 * out


class OptionalArgument(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = F.relu(self.bn(self.conv(x)))
        return out if mask is None else out * mask


class AsksType(Block):
    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.cat(x)
        return F.relu(self.bn(self.conv(x)))


class NoGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.conv(x)
        return F.relu(self.bn(x))


class Checkpointed(Block):
    def inner(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Draws(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.conv(x)))
        return out if random.random() < 0.5 else 2 * out


class DrawsTorch(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.conv(x)))
        return out if torch.rand(()).item() < 0.5 else 2 * out


class Counts(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return F.relu(self.bn(self.conv(x))) * self.count


class CountsInBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return F.relu(self.bn(self.conv(x)))


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return F.relu(self.bn(self.conv(x)))


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x))) + torch.ones(3, 1, 1).double()


class OwnCopy(Block):
    def __reduce__(self) -> Any:
        return super().__reduce__()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class SharedRelu(Block):
    """The ReLU module is also called where no norm is in front: it must stay for that call."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(self.relu(self.bn(self.conv(x)))))


class SlotRelu(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(self.bn(self.conv(x))))


class BothNorms(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + self.other(x))


class ReluInSequential(Block):
    """The ReLU behind the add is the first module of a Sequential that ends in a norm, which no ReLU follows."""

    def __init__(self) -> None:
        super().__init__()
        self.then = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.bn(self.conv(x)) + x)


class ReluInSequentials(ReluInSequential):
    """And so is the norm before it the end of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(F.relu(self.bn(self.conv(x))) + self.first(x))


class AddInto(Block):
    """The add does not promote: the output is of the norm's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


class AddIntoShortcut(AddInto):
    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        out += self.shortcut(x).float()
        return self.relu(out)
