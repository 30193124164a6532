"""What a learning rate, a weight decay and a momentum mean for scale-invariant weights, and equivalent recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from normmatters.optim._base import check_numbers
from normmatters.optim.equilibrium import equilibrium_angle, filter_sums, steps_to_equilibrium
from normmatters.optim.weight_decay_free import largest_decay
from normmatters.text_table import aligned


@dataclass(frozen=True)
class Recipe:
    """A learning rate, weight decay and momentum of SGD.

    >>> Recipe(0.1, 5e-4, 0.9).with_lr(0.2)
    Recipe(lr=0.2, weight_decay=0.00025, momentum=0.9)
    """

    lr: float
    weight_decay: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum)

    @property
    def angle(self) -> float:
        """Angle per step in equilibrium: what `AngularSGD(angle=…)` takes in place of lr and weight decay."""
        return equilibrium_angle(self.lr, self.weight_decay, self.momentum)

    def with_lr(self, lr: float) -> Recipe:
        """The same training at another learning rate: ηλ stays, so the angle stays.

        Exact from the first step if scale-invariant weights start √(lr'/lr) times as long; else from equilibrium on.
        """
        check_numbers(lr=lr)
        if lr == 0:
            raise ValueError("no weight decay gives the same training at lr 0")
        return replace(self, lr=lr, weight_decay=self.lr * self.weight_decay / lr)

    def with_weight_decay(self, weight_decay: float) -> Recipe:
        """The same training at another weight decay: ηλ stays, so the angle stays."""
        check_numbers(weight_decay=weight_decay)
        if weight_decay == 0:
            raise ValueError("no lr gives the same training at weight decay 0: use the angle, or WeightDecayFreeSGD")
        return replace(self, weight_decay=weight_decay, lr=self.lr * self.weight_decay / weight_decay)

    def with_momentum(self, momentum: float) -> Recipe:
        """The same speed at another momentum: η/(1−μ) stays, so norms and time constants stay; the angle changes.

        Consecutive steps are then correlated differently, but directions are forgotten at the same rate.
        """
        check_numbers(momentum=momentum)
        return replace(self, momentum=momentum, lr=self.lr * (1 - momentum) / (1 - self.momentum))

    @classmethod
    def from_angle(cls, angle: float, lr: float, momentum: float = 0.0) -> Recipe:
        """The recipe with this learning rate that turns weights by ``angle`` per step in equilibrium."""
        check_numbers(angle=angle, lr=lr)
        if lr == 0:
            raise ValueError("no weight decay turns weights at lr 0")
        s, q = filter_sums(momentum)
        return cls(lr, angle**2 * s / (2 * lr * q), momentum)


@dataclass(frozen=True)
class Row:
    """One line of the table: a quantity, its value as text, and what it means."""

    quantity: str
    value: str
    meaning: str


def explain(lr: float, weight_decay: float, momentum: float = 0.0) -> list[Row]:
    """Explain an SGD recipe: its equilibrium, its time scales, and recipes that train the same way.

    >>> explain(0.1, 5e-4, 0.9)[0]
    Row(quantity='angle per step', value='0.007255 rad (0.416°)', meaning='in equilibrium: √(2ηλ/(1+μ))')
    """
    recipe = Recipe(lr, weight_decay, momentum)
    total, _ = filter_sums(momentum)
    product, bound = lr * weight_decay, largest_decay(momentum)
    limit = 2 * (1 + momentum)  # from there on w ← (1−ηλ)w with momentum overshoots zero by more each time
    if product == 0 or product >= limit:
        why = "without weight decay the norm grows and the angle falls for ever" if lr else "with lr 0 nothing moves"
        if product:
            why = f"lr · weight decay is {product:g}, and from 2(1+μ) = {limit:g} on decay makes weights grow"
        return [Row("angle per step", "no equilibrium", why), Row("effective lr", f"{lr * total:g}", "η/(1−μ)")]
    angle = f"{recipe.angle:.4g} rad ({math.degrees(recipe.angle):.3g}°)"
    norm = f"{(lr * total / (2 * weight_decay)) ** 0.25:.4g} · √G"
    steps = f"{steps_to_equilibrium(lr, weight_decay, momentum):.4g} steps"
    memory = f"{1 / (product * total):.4g} steps"
    rows = [
        Row("angle per step", angle, "in equilibrium: √(2ηλ/(1+μ))"),
        Row("norm", norm, "in equilibrium: ‖w‖⁴ = ηG²/(2λ(1−μ)), G the gradient norm at ‖w‖ = 1"),
        Row("time to equilibrium", steps, "in which ‖w‖⁴ comes e times closer to it: (1−μ)/(4ηλ)"),
        Row("memory", memory, "in which a gradient's share of w falls to 1/e: (1−μ)/(ηλ)"),
        Row("effective lr", f"{lr * total:g}", "η/(1−μ)"),
        Row("lr · weight decay", f"{product:g}", "sets the angle and the times, at a given momentum"),
        _weight_decay_free(recipe, bound),
        _angular(recipe),
    ]
    for factor in (2.0, 0.5):
        rows.append(Row("same: other lr", _text(recipe.with_lr(lr * factor)), f"norms × {factor**0.5:.4g}"))
    rows.append(Row("same: other weight decay", _text(recipe.with_weight_decay(weight_decay * 10)), "norms × 0.3162"))
    if momentum > 0:
        other = _text(recipe.with_momentum(0.0))
        rows.append(Row("same speed: no momentum", other, "same norms and times, other angle"))
    return rows


def _weight_decay_free(recipe: Recipe, bound: float) -> Row:
    name = "same: growing lr"
    x, mu = recipe.lr * recipe.weight_decay, recipe.momentum
    if x > bound:
        return Row(name, "none", f"lr · weight decay is above (1−√μ)² = {bound:.4g}: momentum overshoots zero")
    if x == 1:
        return Row(name, "none", "lr · weight decay is 1: nothing is left of the weights")
    # The fixed point of κ (see weight_decay_free): s solves s² − (1+μ−ηλ)s + μ = 0, and α grows by 1/s per step. With
    # r = 1 − s that is r² − (1−μ+ηλ)r + ηλ = 0, which keeps its digits for the smallest ηλ.
    c = 1 - mu + x
    r = 2 * x / (c + math.sqrt(max(c * c - 4 * x, 0.0)))
    growth = -2 * math.log1p(-r)
    doubles = f"WeightDecayFreeSGD, exact: lr doubles every {math.log(2) / growth:.4g} steps"
    return Row(name, f"× {math.exp(growth):.6g} per step", doubles)


def _angular(recipe: Recipe) -> Row:
    name = "same: no weight decay"
    if recipe.angle >= math.pi / 2:
        return Row(name, "none", "the angle is π/2 or more: a step that forgets the weight, and no equilibrium")
    call = f"AngularSGD(angle={recipe.angle:.4g}, momentum={recipe.momentum:g})"
    return Row(name, call, "norms fixed, the same angle per step")


def _text(recipe: Recipe) -> str:
    return f"lr {recipe.lr:g}, wd {recipe.weight_decay:g}, momentum {recipe.momentum:g}"


def render(rows: Iterable[Row]) -> str:
    """The rows as plain aligned text."""
    return aligned([(row.quantity, row.value, row.meaning) for row in rows])
