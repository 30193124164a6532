"""The command ``normmatters``. Imports wait until a command needs them, so that ``--help`` is quick."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, get_args

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:  # the library itself needs neither
    sys.exit(f'The command needs {error.name}: run pip install ".[lab]" in the folder of normmatters')
except ImportError as error:
    sys.exit(f"The command cannot start: {error}")

from normmatters.doctor.cli import doctor

if TYPE_CHECKING:
    from normmatters.lab.report import Report

_HELP = """Norm-aware training, and every figure and table of "Norm matters" by one command.

[bold]Start here[/]

  normmatters reproduce all                      [dim]the whole paper, in minutes[/]
  normmatters reproduce fig1 --preset cifar      [dim]Fig. 1 on CIFAR-10[/]
  normmatters train my.toml --set model.norm=l1  [dim]a run of your own[/]
  normmatters explain --lr 0.1 --wd 5e-4         [dim]what these two amount to[/]
  normmatters doctor my.module:net               [dim]what the norms of a model do[/]
  normmatters bench layers --smoke               [dim]does the benchmark run here?[/]
"""

app = typer.Typer(
    help=_HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Get data ready.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="NORMMATTERS_DATA", help="Folder with the data sets.", show_default="./data"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting, such as optim.lr=0.05. May be repeated."),
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
_SEEDS = {"quick": 2, "small": 3, "short": 2, "cifar": 3, "full": 1}


def main() -> None:
    """Run the command line: an error that is no mistake of ours is one red line and exit code 2, others a traceback."""
    # Taken out here, so that it may stand anywhere on the line.
    debug = "--debug" in sys.argv or bool(os.environ.get("NORMMATTERS_DEBUG"))
    sys.argv = [word for word in sys.argv if word != "--debug"]
    codecs.register_error("plain", _in_plain_signs)
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no ✓ is no reason to stop runs
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")
    try:
        with contextlib.redirect_stdout(_NeverFull(sys.stdout)):  # type: ignore[type-var]
            app()
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C
            with contextlib.suppress(OSError):
                Console(stderr=True).print("Stopped. The same command resumes its runs.")
        raise
    except Exception as error:
        from normmatters.lab.errors import expected_message

        if debug or (message := expected_message(error)) is None:
            raise
        _fail(message)


class _NeverFull:
    """A stream that drops what it cannot write to a full disk, so that no run stops. A closed pipe ends as usual."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._or_drop(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._or_drop(self._stream.flush)

    def _or_drop(self, do: Callable[..., object], *arguments: str) -> None:
        try:
            do(*arguments)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            with open(os.devnull, "w") as nowhere:  # the rest of the stream's buffer goes there
                os.dup2(nowhere.fileno(), self._stream.fileno())


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    """Replace signs that a terminal's encoding lacks: a number keeps its sign, and a verdict its mark."""
    assert isinstance(error, UnicodeEncodeError)
    plain = {"−": "-", "–": "-", "×": "x", "÷": "/", "✓": "+", "✗": "x"}
    return "".join(plain.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def _fail(message: str) -> NoReturn:
    text = " ".join(message.split())
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]Error:[/] [red]{escape(text)}[/]")
    sys.exit(2)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the whole traceback of an error.")] = False,
) -> None:
    """``--debug`` is read in ``main``; it is here for the help."""


@app.command(rich_help_panel="The paper")
def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="fig1 fig2 fig3 fig4 supp1 supp2 table1 table2 lp_weight_norm speed l1_gap lean resnet56_norms "
            "s1 to s8, one cell such as fig1/wd_off, or all.",
        ),
    ],
    preset: Annotated[
        str,
        typer.Option(
            help="[bold]quick[/]: embedded data. [bold]cifar[/]: CIFAR-10, Tiny-ImageNet, Multi30k; "
            "[bold]short[/]: the same, fewer epochs. "
            "[bold]small[/]: small networks (s1 to s8). [bold]full[/]: ImageNet, WMT14."
        ),
    ] = "quick",
    data: Annotated[str | None, typer.Option(help="A data set in place of the preset's, such as cifar10.")] = None,
    data_dir: DataDir = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs of each cell, one per seed.",
            show_default=", ".join(f"{p} {n}" for p, n in _SEEDS.items()),
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many runs train at the same time.", show_default="cores; 1 on a GPU")
    ] = None,
    device: DeviceName = "auto",
    out: Annotated[Path, typer.Option(help="Where run folders and the report go; the preset's name is added.")] = Path(
        "runs"
    ),
    published: Annotated[
        Path | None,
        typer.Option(
            help="Folder of published results (see `publish`). They are not run again, and are in the report."
        ),
    ] = None,
    sets: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Show what would run, and stop.")] = False,
) -> None:
    """Redraw the paper's figures and tables from runs of your own.

    Run the same command again at any time: finished runs are kept, and stopped runs resume.

    [bold]Examples[/]

      normmatters reproduce all --preset quick --jobs 2
      normmatters reproduce fig1 table2 --preset cifar --data-dir ~/data --jobs 4
      normmatters reproduce fig1 --seeds 5 --set optim.epochs=4 --out /tmp/try
    """
    from normmatters.lab.cells import experiment_names, load_cells
    from normmatters.lab.plan import make_plan, place
    from normmatters.lab.runner import Runner
    from normmatters.lab.terminal import RunsView, show_reasons

    load_cells(name for name in names if name != "all")  # a misspelt one is an error beside "all" too
    chosen = list(dict.fromkeys(experiment_names() if "all" in names else names))
    out = _folder_to_write(out, "--out") / preset
    _check_exists(data_dir, "--data-dir")
    _check_exists(published, "--published")
    seeds = seeds or _SEEDS.get(preset, 1)
    kept = published / preset if published and (published / preset).is_dir() else None
    plan = make_plan(chosen, preset, out, seeds=seeds, overrides=sets or (), data=data, published=kept)
    waiting = [run for run in plan if run.state == "waiting"]
    console = Console(highlight=False)
    cells, done = len({run.id for run in plan}), len(plan) - len(waiting)
    finished = f", {done} of them finished" if done else ""
    console.print(
        f"[bold]{_count(len(plan), 'run')}[/] of {_count(cells, 'cell')} in {escape(str(out))}{finished}",
    )
    if dry_run:
        for run in waiting:
            console.print(f"  {run.id} [dim]seed {run.seed}, {run.epochs} epochs")
        return
    workers = place(plan, device, jobs)
    failed = []
    if waiting:
        view = RunsView(console, plan)
        with view.progress:
            failed = Runner(plan, workers=workers, data_dir=data_dir).run(view)
    from normmatters.lab.report import write_report

    runs = [run.folder for run in plan if run.state == "done" and (run.folder / "config.json").exists()]
    runs += [run.published for run in plan if run.published and run.folder not in runs]
    if runs:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        _show_report(console, write_report(runs, out / "report", command=command))
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(plan)} runs did not finish:[/]")
        show_reasons(console, failed)
        raise typer.Exit(1)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _folder_to_write(path: Path, option: str) -> Path:
    """A folder whose name every file of ours can hold; checked before anything is trained."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{option} {str(path)!r}: expected a name in UTF-8") from None
    return path


def _check_exists(folder: Path | None, option: str) -> None:
    if folder is not None and not folder.expanduser().is_dir():
        raise ValueError(f"{option} {folder}: no such folder")


def _show_report(console: Console, report: Report) -> None:
    """The verdicts as a table, then where the page is."""
    from rich.table import Table

    colors = {"holds": "green", "fails": "red", "open": "dim"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "Claim", "Measured"):
        table.add_column(column)
    for v in report.verdicts:
        mark = f"[{colors[v.verdict]}]{v.mark}[/]"
        table.add_row(mark, f"{escape(v.text)} [dim]{v.claim.check}[/]", escape(v.measured))
    if report.verdicts:
        console.print(table)
        count = {kind: sum(v.verdict == kind for v in report.verdicts) for kind in colors}
        console.print(
            f"\n[green]{count['holds']} claims hold[/], [red]{count['fails']} do not[/], "
            f"{count['open']} cannot be told from these runs.",
        )
    if report.not_run:
        console.print(escape(report.not_run), style="dim", soft_wrap=True)
    console.print(f"[bold]Report:[/] {escape(str(report.html.resolve()))}", soft_wrap=True)


@app.command(rich_help_panel="Your own runs")
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A TOML file: a run of your own, or a cell under experiments/.")
    ],
    sets: Sets = None,
    preset: Annotated[
        str, typer.Option(help="Which preset of a cell: [bold]quick[/] (embedded data), small, short, cifar or full.")
    ] = "quick",
    seed: Annotated[int | None, typer.Option(help="Random seed; the file's own unless given.")] = None,
    data_dir: DataDir = None,
    device: DeviceName = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder.", show_default="runs/EXPERIMENT/CELL/seedN; CELL,KEY=VALUE with --set"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", metavar="", help="Start anew, and replace what the run's folder holds.")
    ] = False,
) -> None:
    """Train one run from a TOML file. A stopped run resumes where it was. Exit code 1 if the loss becomes NaN.

    [bold]Examples[/]

      normmatters train experiments/fig1/wd_on.toml
      normmatters train my.toml --set model.norm=l1 --set optim.lr=0.05
      torchrun --nproc-per-node 4 -m normmatters train my.toml
    """
    from normmatters.lab.cells import load_file
    from normmatters.lab.config import overrides_name, run_path
    from normmatters.lab.execution import find_device
    from normmatters.lab.terminal import train_with_progress

    _check_exists(data_dir, "--data-dir")
    run = load_file(config).config(preset, seed, sets or ())
    chosen = find_device(run.runtime.device if device == "auto" else device)
    run = replace(run, runtime=replace(run.runtime, device=str(chosen)))
    folder = out or run_path(Path("runs"), run, overrides_name(sets or ()))
    result = train_with_progress(run, _folder_to_write(folder, "--out"), data_dir, resume=not fresh)
    if result.status != "finished":
        raise typer.Exit(1)  # its loss became NaN: a script should know


@app.command(rich_help_panel="The paper")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders with runs below them.")],
    out: Annotated[Path, typer.Option(help="Where the page, the Markdown and the figures go.")] = Path("report"),
) -> None:
    """Turn run folders into one HTML page, Markdown, and figures as SVG.

    [bold]Examples[/]

      normmatters report runs/quick --out report
      normmatters report runs/cifar/fig1 runs/cifar/table2 --out docs/results
    """
    from normmatters.lab.report import write_report

    console = Console(highlight=False)
    with console.status("reading runs") as status:
        written = write_report(runs, out, progress=status.update)
    _show_report(console, written)


@app.command(rich_help_panel="The paper")
def publish(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUNS]...", help="Folders with runs below them.")
    ] = None,
    preset: Annotated[str, typer.Option(help="The preset that the runs are of: a folder below --to.")] = "cifar",
    to: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("results"),
    into: Annotated[
        list[Path] | None,
        typer.Option(help="A page with parts between <!-- numbers: E1 --> and its end. May be repeated."),
    ] = None,
) -> None:
    """Keep finished runs as one small file each, and redraw all pages from such files.

    [bold]Examples[/]

      normmatters publish runs/cifar --preset cifar
      normmatters publish --into README.md        [dim]only redraw: what `make report` does[/]
    """
    from normmatters.lab.cells import PRESETS
    from normmatters.lab.publish import publish as keep
    from normmatters.lab.publish import redraw
    from normmatters.lab.schema import check_name

    check_name("preset", preset, PRESETS)
    console = Console(highlight=False)
    if runs:
        kept = keep(runs, to / preset)
        console.print(f"[bold]{_count(len(kept), 'run')}[/] in {escape(str(to / preset))}")
    for report in redraw(to, into or ()):
        _show_report(console, report)


@app.command(rich_help_panel="The library")
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="layers resnet50 layernorm weightnorm optim cpu; all by default."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", metavar="", help="Small shapes, a few seconds, any machine.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Rows with this word, such as fp16 or l1; several as fp16,l1."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1.", show_default="a GPU where there is one")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the numbers here as well.", show_default="results/bench; nowhere with --smoke or --only"
        ),
    ] = None,
) -> None:
    """Time the library against its peers. A kernel whose check fails gets no number.

    [bold]Examples[/]

      normmatters bench layers --smoke
      normmatters bench resnet50 --device cuda --out results/resnet50
    """
    from normmatters import bench as package

    raise typer.Exit(package.run(list(names or []), smoke=smoke, device=device, out=out, only=only or ()))


@app.command(rich_help_panel="The library")
def explain(
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    wd: Annotated[float, typer.Option("--wd", "--weight-decay", help="Weight decay.")] = 5e-4,
    momentum: Annotated[float, typer.Option(help="Momentum.")] = 0.9,
) -> None:
    """What a learning rate, a weight decay and a momentum amount to for weights followed by a norm.

    [bold]Examples[/]

      normmatters explain --lr 0.1 --wd 5e-4 --momentum 0.9
    """
    from normmatters.optim import recipe

    Console(highlight=False).print(recipe.render(recipe.explain(lr, wd, momentum)), markup=False, soft_wrap=True)


app.command(rich_help_panel="The library")(doctor)


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="cifar10, tiny_imagenet, imagefolder, text, digits or numbers.")],
    data_dir: DataDir = None,
) -> None:
    """Find a data set, check it, download it where that is possible, and show what there is.

    [bold]Examples[/]

      normmatters data prepare cifar10 --data-dir ~/data
      normmatters data prepare digits
    """
    from normmatters.lab.config import DataConfig, DataName
    from normmatters.lab.data import ImageData, data_root, load_data
    from normmatters.lab.schema import check_name

    check_name("data set", name, get_args(DataName))
    dataset = load_data(DataConfig(name=name, batch_size=1), data_dir)  # type: ignore[arg-type]
    console = Console(highlight=False)
    embedded = name in ("digits", "numbers")
    where = "embedded, nothing to prepare" if embedded else f"ready in {escape(str(data_root(data_dir)))}"
    console.print(f"[green]✓[/] {name}: {where}")
    if isinstance(dataset, ImageData):
        console.print(f"  {dataset.classes} classes, {dataset.channels}×{dataset.size}×{dataset.size}")
    else:
        console.print(f"  {dataset.train.count} pairs of sentences, {dataset.vocab_size} tokens")
