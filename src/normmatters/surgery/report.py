"""What a conversion did, module by module, as data and as a plain-text table."""

from __future__ import annotations

from dataclasses import dataclass, field

from normmatters.text_table import aligned


@dataclass(frozen=True)
class Change:
    """One normalization layer of the model: what it was, what it is now, and why if it was not converted or not fused.

    ``after`` is None for a module that was left as it was; ``fused`` is ``""``, ``"relu"``, ``"add + relu"``,
    ``"relu + max pool"``, or ``"registered"`` in a block of :func:`~normmatters.register_fusion`.

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
    """What :func:`~normmatters.convert` or :func:`~normmatters.to_torch` converted, fused and skipped.

    Pass an empty one as ``report=`` and print it afterwards. It belongs to the call, not to the model. ``fused`` says
    what a norm takes over where its block's ``forward`` runs as it is written; it is decided at every call.
    ``forwards`` holds the rewritten ``forward`` of each class of blocks, as source.

    Example::

        >>> report = ConversionReport()
        >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), report=report)
        >>> print(report)
        module  before       after          fused  note
        1       BatchNorm2d  L1BatchNorm2d  relu
        1 converted, 1 fused, 0 skipped
    """

    changes: list[Change] = field(default_factory=list)
    forwards: dict[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> list[Change]:
        """The modules that were replaced, fused or not."""
        return [change for change in self.changes if change.after is not None]

    @property
    def fused(self) -> list[Change]:
        """The modules that run together with the ReLU after them, and maybe an add before it or a max pool after it."""
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
