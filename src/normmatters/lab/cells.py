"""The paper's figures and tables as TOML files: one file per cell, the paper's own regime as its body.

A cell file is a run's config (see ``config.py``) with a few more keys, which are split off here:

``[paper]``          the paper's number for this cell: ``metric``, ``value``, ``setting``
``[preset.NAME]``    what another scale of data changes: ``quick`` (embedded data, minutes on a laptop) or ``cifar``
                     (CIFAR-10, Tiny-ImageNet, Multi30k); ``short`` is ``cifar`` with fewer epochs where it
                     has many, ``small`` with smaller networks and few epochs. The preset ``full`` is the body itself.
``same_as = "a/b"``  the paper prints this number twice: cell ``b`` of experiment ``a`` is the run
``only = ["cifar"]`` the presets that run this cell; all but ``small`` where it does not say
``[grid.SECTION]``   settings with a list of values each: the file is a cell for each combination of them, at every
                     preset. Its ``cell`` and ``label`` have a ``{}`` for each setting, as ``cell = "lr_{}_wd_{}"``.

>>> load_cell("fig1/wd_on").config("quick", seed=0).data.name
'digits'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from normmatters.lab import config as _config
from normmatters.lab.config import RunConfig
from normmatters.lab.schema import build, check_name

Preset = Literal["quick", "small", "short", "cifar", "full"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
_USUAL = tuple(name for name in PRESETS if name != "small")


@dataclass(frozen=True)
class Paper:
    """What the paper says of a cell: ``value`` is None where it shows a curve or says it in words only.

    ``regime`` is what the paper has where the cell's body has something else, ``departs`` what no setting can say.
    """

    metric: Literal["accuracy", "bleu", "ppl"] = "accuracy"
    value: float | None = None
    setting: str = ""
    note: str = ""
    departs: tuple[str, ...] = ()
    regime: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Keys:
    """The keys of a cell's file that are no settings of its run."""

    paper: Paper = field(default_factory=Paper)
    preset: Mapping[Preset, Mapping[str, Any]] = field(default_factory=dict)
    same_as: str | None = None
    only: tuple[Preset, ...] = _USUAL


@dataclass(frozen=True)
class Cell:
    """One cell of one experiment, before a preset and a seed are chosen."""

    id: str
    label: str
    path: Path
    table: Mapping[str, Any]
    presets: Mapping[Any, Mapping[str, Any]]
    paper: Paper
    same_as: str | None = None
    only: tuple[Preset, ...] = _USUAL
    point: Mapping[str, Any] = field(default_factory=dict)  # the settings of its file's grid, which no preset changes

    @property
    def experiment(self) -> str:
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        return self.id.partition("/")[2]

    @property
    def of_user(self) -> bool:
        """Whether it has no file here: it stands for a run of the user's own."""
        return not self.table and not self.same_as

    @property
    def source(self) -> str:
        """The id of the cell whose run gives this cell's number: its own unless ``same_as`` names another."""
        return self.same_as or self.id

    def config(self, preset: str = "full", seed: int | None = None, overrides: Iterable[str] = ()) -> RunConfig:
        """The run of this cell at one scale of data; ``seed`` None is the file's own, 0 where it has none.

        A cell that is the same as another gives that one's run.
        """
        check_name("preset", preset, PRESETS)
        if self.same_as:
            return load_cell(self.same_as).config(preset, seed, overrides)
        table, overrides = dict(self.table), list(overrides)
        for name in ("cifar", preset) if preset in ("small", "short") else (preset,):
            table = _config.merge(table, dict(self.presets.get(name, {})))
        table = _config.merge(table, dict(self.point))
        if seed is not None:
            table["seed"] = seed
        if not overrides:
            return _config.from_dict(table, f"{self.path} (preset {preset})")
        # The file itself was checked when it was loaded.
        table = _config.merge(table, _config.overrides_table(overrides))
        return _config.from_dict(table, f"--set {' --set '.join(overrides)}")


@cache
def folder() -> Path:
    """Where the experiment files are: inside an installed package, or at the top of a source tree."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "experiments", package.parents[1] / "experiments"):
        if (place / "fig1").is_dir():
            return place
    raise FileNotFoundError(f"no experiments folder beside {package}: the installation is incomplete")


def experiment_names() -> list[str]:
    """Every experiment, in the paper's order: the figures, the supplement, the tables, what is said in words, ours."""
    order = ("fig1", "fig2", "fig3", "fig4", "supp1", "supp2", "table1", "table2", "lp_weight_norm", "speed")
    names = {path.name for path in folder().iterdir() if any(path.glob("[!_]*.toml"))}
    return [name for name in order if name in names] + sorted(names - set(order))


def load_file(path: str | Path) -> Cell:
    """Read the file of one cell. Unknown keys are errors, in the preset tables as well."""
    cells = _read_cells(Path(path))
    if len(cells) > 1:
        raise ValueError(f"{path}: expected one cell, got a grid of {len(cells)}")
    return cells[0]


def _read_cells(path: Path) -> list[Cell]:
    """The cells of a file: one, or those of its grid."""
    table = _config.read_toml(path)
    if "grid" not in table:
        return [_read_cell(path, table)]
    grid = table.pop("grid")
    lists = grid.values() if isinstance(grid, Mapping) else [grid]
    if not all(isinstance(t, Mapping) and all(isinstance(v, list) for v in t.values()) for t in lists):
        raise ValueError(f"{path}: expected lists of values, such as [grid.optim] lr = [0.1, 0.2], got grid = {grid!r}")
    settings = [(section, key) for section, keys in grid.items() for key in keys]
    for key in ("cell", "label"):
        if not isinstance(text := table.get(key), str) or text.count("{}") != len(settings):
            raise ValueError(
                f"{path}: {key} needs a {{}} for each of the grid's {len(settings)} settings, got {text!r}"
            )
    cells = []
    for values in product(*(grid[section][key] for section, key in settings)):
        point: dict[str, Any] = {}
        for (section, key), value in zip(settings, values):
            point = _config.merge(point, {section: {key: value}})
        names = {key: table[key].format(*values) for key in ("cell", "label")}
        cells.append(_read_cell(path, table | names, point))
    return cells


def _read_cell(path: Path, table: dict[str, Any], point: Mapping[str, Any] | None = None) -> Cell:
    """The cell of a file's table, and of a point of its grid."""
    table = dict(table)
    own = {key.name: table.pop(key.name) for key in fields(_Keys) if key.name in table}
    keys: _Keys = build(_Keys, own, "", str(path))
    if keys.same_as and (lost := [*(table.keys() - {"experiment", "cell", "label"}), *keys.preset]):
        problem = f"the same as {keys.same_as}, whose settings count: {', '.join(sorted(lost))} would be ignored"
        raise ValueError(f"{path}: {problem}")
    experiment, name = table.setdefault("experiment", path.resolve().parent.name), table.setdefault("cell", path.stem)
    label = table.get("label") or name
    same_as, only = keys.same_as, keys.only
    cell = Cell(f"{experiment}/{name}", label, path, table, keys.preset, keys.paper, same_as, only, point or {})
    if same_as is None:
        for preset in PRESETS:
            cell.config(preset)
    return cell


@cache
def _cells_of(experiment: str) -> dict[str, Cell]:
    """The experiment's cells by name, in the order of their files."""
    files = sorted((folder() / experiment).glob("[!_]*.toml"))
    return {cell.name: cell for path in files for cell in _read_cells(path)}


@cache
def load_cell(id: str) -> Cell:
    """The cell ``"experiment/cell"``."""
    experiment, _, name = id.partition("/")
    check_name("experiment", experiment, experiment_names())
    cells = _cells_of(experiment)
    check_name(f"cell of {experiment}", name, sorted(cells))
    return cells[name]


def load_cells(names: Iterable[str] = ()) -> list[Cell]:
    """The cells of the named experiments, or those named ``"experiment/cell"``; all, in the paper's order, if none is.

    >>> [cell.id for cell in load_cells(["lp_weight_norm", "fig1/wd_on"])]
    ['lp_weight_norm/l1', 'lp_weight_norm/l2', 'lp_weight_norm/linf', 'fig1/wd_on']
    """
    cells = []
    for name in list(names) or experiment_names():
        if "/" in name:
            cells.append(load_cell(name))
            continue
        check_name("experiment", name, [*experiment_names(), "all"])
        cells += _cells_of(name).values()
    return cells


def matching(id: str) -> list[str]:
    """The ids that a pattern such as ``"s2/lr_*"`` stands for, in the order of their files; an id itself.

    >>> matching("lp_weight_norm/l*"), matching("fig1/wd_on")
    (['lp_weight_norm/l1', 'lp_weight_norm/l2', 'lp_weight_norm/linf'], ['fig1/wd_on'])
    """
    if "*" not in id:
        return [id]
    return [cell.id for cell in load_cells([id.partition("/")[0]]) if fnmatchcase(cell.id, id)]
