"""What a conversion did, module by module, as data and as a plain-text table."""

from __future__ import annotations

from dataclasses import dataclass, field

from normmatters.text_table import aligned


@dataclass(frozen=True)
class Change:
    """One module of the model: what it was, what it is now, and why if that is not all one could wish for.

    ``after`` is None for a module that was left as it was; ``fused`` is ``""``, ``"relu"``, ``"add + relu"`` or
    ``"relu + max pool"``.

    >>> Change("layer1.0.bn1", "BatchNorm2d", "L1BatchNorm2d", fused="relu").after
    'L1BatchNorm2d'
    """

    name: str
    before: str
    after: str | None
    fused: str = ""
    note: str = ""


@dataclass
class ConversionReport:
    """What :func:`~normmatters.convert.convert` or :func:`~normmatters.convert.to_torch` converted, fused and skipped.

    Pass an empty one as ``report=`` and print it afterwards. It belongs to the call, not to the model: nothing is
    attached to the model.

    Example::

        >>> report = ConversionReport()
        >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), report=report)
        >>> print(report)
        module  before       after          fused  note
        1       BatchNorm2d  L1BatchNorm2d  relu
        1 converted, 1 fused, 0 skipped
    """

    changes: list[Change] = field(default_factory=list)

    @property
    def converted(self) -> list[Change]:
        """The modules that were replaced, fused or not."""
        return [change for change in self.changes if change.after is not None]

    @property
    def fused(self) -> list[Change]:
        """The modules that took over a ReLU, alone or with the add before or the max pool behind it."""
        return [change for change in self.changes if change.fused]

    @property
    def skipped(self) -> list[Change]:
        """The modules that were left as they were; ``note`` says why."""
        return [change for change in self.changes if change.after is None]

    def __str__(self) -> str:
        rows = [("module", "before", "after", "fused", "note")]
        for c in self.changes:
            rows.append((c.name or "(model)", c.before, c.after or "(kept)", c.fused or "-", c.note))
        return f"{aligned(rows)}\n{self.summary()}"

    def summary(self) -> str:
        """The counts in one line."""
        return f"{len(self.converted)} converted, {len(self.fused)} fused, {len(self.skipped)} skipped"


def report_to_fill(report: ConversionReport | None) -> ConversionReport:
    """``report``, or a new one where there is none; raises on anything else, before a model is changed."""
    if report is not None and not isinstance(report, ConversionReport):
        raise TypeError(f"report must be a ConversionReport to fill, or None, got {type(report).__name__}")
    return ConversionReport() if report is None else report
