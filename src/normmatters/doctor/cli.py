"""``normmatters doctor``: finds the model that is meant, and prints what :func:`normmatters.doctor.diagnose` says."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normmatters.doctor import Diagnosis

_DTYPES = ("float32", "float16", "bfloat16")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
# Where training programs put the state_dict in what they save.
_HOMES = ("state_dict", "model", "model_state_dict", "net", "module")


def _print_environment(wanted: bool) -> None:
    """Print which kernels serve normalizations in this environment, and why not others; then stop."""
    if not wanted:
        return
    import torch

    from normmatters.kernels import backends, cpu

    library = cpu.library()
    console = Console(soft_wrap=True, highlight=False)
    threads = torch.get_num_threads()
    console.print(f"torch {torch.__version__}, {threads} thread{'s' if threads > 1 else ''}")
    gpu = backends.TRITON_MISSING or ("" if torch.cuda.is_available() else "torch finds no GPU here")
    native = backends.NATIVE_MISSING
    served = "" if library is None else f" ({library.isa}, {library.path})"
    console.print(f"on a GPU: {f'Triton kernels not used: {gpu}' if gpu else 'Triton kernels'}")
    console.print(f"on a CPU: {f'plain PyTorch: {native}' if native else 'native kernels' + served}")
    raise typer.Exit


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:name of a model, or of a function or class that returns one. "
            "Or a checkpoint: .safetensors or .pt.",
        ),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="An argument of that function or class. May be repeated."
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A checkpoint to load into the model.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="N,...",
            help="Shape of a training batch, such as 8,3,32,32. Or a .safetensors or .pt file with a real batch: "
            "it also shows how heavy the tails are that a norm sees.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="The input holds token numbers below this one, not real numbers.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    wd: Annotated[float, typer.Option("--wd", "--weight-decay", help="Weight decay.")] = 5e-4,
    momentum: Annotated[float, typer.Option(help="Momentum.")] = 0.9,
    norm: Annotated[
        str, typer.Option(help="What convert would turn batch norms into: l1, linf, topk, 1.5, ...")
    ] = "l1",
    layer_norm: Annotated[str | None, typer.Option(help="The same for layer norms. Without it they stay.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the activations: float32, float16 or bfloat16.")] = None,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="Skip the test for scale invariance.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
    env: Annotated[
        bool,
        typer.Option(
            "--env",
            metavar="",
            is_eager=True,
            callback=_print_environment,
            help="Only say which kernels run here, and why not others. Needs no MODEL.",
        ),
    ] = False,
) -> None:
    """Which norms a model has, what they do to its weights, what they keep for backward, and what convert would change.

    [bold]Examples[/]

      normmatters doctor torchvision.models:resnet50 --input 256,3,224,224 --dtype float16 --quick
      normmatters doctor my_package.nets:Net --set width=2 --input 8,3,32,32 --lr 0.1 --wd 5e-4
      normmatters doctor my_package.nets:Net --weights trained.pt --input batch.safetensors
      normmatters doctor checkpoint.safetensors --lr 0.1
    """
    from normmatters.optim import Recipe

    Recipe(lr, wd, momentum)  # a wrong number is an error before a large model is built
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    batch = Path(shape) if shape is not None and Path(shape).suffix in _FILES else None
    size = None if shape is None or batch is not None else _shape(shape)
    if tokens is not None and size is None:
        raise ValueError("--tokens says what the input holds: give its shape too, with --input")
    import torch

    from normmatters.doctor import diagnose
    from normmatters.doctor.diagnosis import first_line

    # Before the model, which may take long: every import and option has been checked when it is built.
    example: Any = None if batch is None else load_batch(batch)
    network = _model(model, sets or (), weights)
    if size is not None and isinstance(network, torch.nn.Module):
        # In float32, activations of a half-precision model would be counted as twice as large. (fp8 is for storage.)
        kinds = (p.dtype for p in network.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
        try:
            example = torch.randn(size, dtype=next(kinds, None)) if tokens is None else torch.randint(tokens, size)
        except (RuntimeError, TypeError, OverflowError) as error:  # more than there is memory, or numbers for it
            raise ValueError(f"--input {shape} cannot be made: {first_line(error)}") from None
    diagnosis = diagnose(
        network,
        example,
        lr=lr,
        weight_decay=wd,
        momentum=momentum,
        norm=_number(norm),
        layer_norm=None if layer_norm is None else _number(layer_norm),
        dtype=None if dtype is None else getattr(torch, dtype),
        invariance=not quick,
        tails=batch is not None,
    )
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2))  # ASCII: a pipe of any encoding loses nothing
    else:
        _print(diagnosis)
    ran = diagnosis.kept is not None or any(weight.invariant is not None for weight in diagnosis.weights)
    if example is not None and not ran and isinstance(network, torch.nn.Module):
        raise typer.Exit(1)  # the model does not run on this input: a note says why


def _shape(text: str) -> tuple[int, ...]:
    try:
        size = tuple(int(part) for part in text.split(","))
    except ValueError:
        size = ()
    if not size or min(size) < 1:
        raise ValueError(f"--input must be sizes of 1 or more with commas between, such as 8,3,32,32, got {text!r}")
    return size


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _model(name: str, sets: Sequence[str], weights: Path | None) -> nn.Module | Mapping[str, Tensor]:
    """The module that ``package.module:name`` gives, or the state_dict of a checkpoint."""
    path, colon, attribute = name.rpartition(":")
    if Path(name).suffix in _FILES:
        if sets or weights is not None:
            raise ValueError("--set and --weights need a model, package.module:name, not a checkpoint alone")
        return load_state_dict(Path(name))
    if not (path and colon and attribute) or path.startswith("."):  # there is nothing that ./nets:net is relative to
        raise ValueError(
            f"MODEL must be package.module:name or a .safetensors, .pt, .pth, .bin or .ckpt file, got {name!r}"
        )
    from torch import nn

    if os.getcwd() not in sys.path:  # a command of its own does not find the user's modules otherwise
        sys.path.insert(0, os.getcwd())
    target: Any = importlib.import_module(path)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{path} has no {attribute!r}")
        target = getattr(target, part)
    if not isinstance(target, nn.Module):
        if not callable(target):
            raise ValueError(f"{name} is neither a module nor something to call, but {type(target).__name__}")
        arguments = _arguments(sets)
        try:
            inspect.signature(target).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}; its arguments are given with --set KEY=VALUE") from None
        except ValueError:  # what is written in C may not say what it takes
            pass
        try:
            target = target(**arguments)
        except Exception as error:  # whatever the user's own code raises
            from normmatters.doctor.diagnosis import first_line

            raise ValueError(f"{name} raised {first_line(error)}") from error
    elif sets:
        raise ValueError(f"--set needs something to call, {name} is a module already")
    if not isinstance(target, nn.Module):
        raise ValueError(f"{name} must give a torch.nn.Module, got {type(target).__name__}")
    if weights is not None:
        try:
            target.load_state_dict(dict(load_state_dict(weights)))
        except RuntimeError as error:  # names and shapes that do not fit
            raise ValueError(f"{weights} does not fit the model: {error}") from None
    return target


def _arguments(sets: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as keyword arguments; a value that is no Python literal is a string."""
    arguments: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"--set must be KEY=VALUE, got {text!r}")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments


def load_state_dict(path: Path) -> Mapping[str, Tensor]:
    """The state_dict in a checkpoint; nothing in the file is executed.

    Args:
        path: a ``.safetensors`` file, or one written by ``torch.save`` that holds tensors and plain containers: the
            state_dict itself, or a dict with it under a usual name.
    """
    import torch

    state = _load(path)
    # The usual names first: what lies beside them may be a tensor too, such as the best accuracy so far.
    candidates = [*(state[home] for home in _HOMES if home in state), state] if isinstance(state, Mapping) else []
    for candidate in candidates:
        if isinstance(candidate, Mapping) and any(isinstance(value, torch.Tensor) for value in candidate.values()):
            return candidate
    raise ValueError(f"{path} holds no state_dict, neither itself nor under {', '.join(_HOMES)}")


def load_batch(path: Path) -> Any:
    """A model's input from a file: a tensor, a list of positional or a dict of keyword arguments, as it was saved.

    One tensor under whatever name, which is all that safetensors can say, is the tensor.
    """
    import torch

    batch = _load(path)
    if isinstance(batch, Mapping) and len(batch) == 1:
        batch = next(iter(batch.values()))
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        raise ValueError(f"{path} must hold a tensor, or a list or dict of tensors, to be an input")
    return batch


def _load(path: Path) -> Any:
    """What a file holds: tensors and plain containers; nothing in it is executed."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
    import torch

    from normmatters.doctor.diagnosis import first_line

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:  # says itself what is wrong
        raise
    except Exception as error:  # what is no such file raises whatever its bytes lead to
        # torch's own advice, to unpickle it after all, comes first, and what is wrong with the file last.
        reason = re.search(r"WeightsUnpickler error:\s+(.+)", str(error))
        other = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds {other[1]}; save a state_dict" if other else reason[1] if reason else first_line(error)
        raise ValueError(f"{path} cannot be read as tensors and plain containers: {why}") from None


def _print(diagnosis: Diagnosis) -> None:
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # lines in a pipe or a file stay whole, and grep finds every name
    for table in diagnosis.tables():
        if not table.rows:
            continue
        # A column that says nothing for this model takes no room.
        columns = [i for i in range(len(table.columns)) if any(row[i] not in ("", "-") for row in table.rows)]
        grid = Table(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for i in columns:
            right = table.columns[i] in ("keeps", "exact", "lean")
            justify: Literal["right", "left"] = "right" if right else "left"
            # Names are there to be copied: a narrow terminal breaks them, but cuts nothing off.
            grid.add_column(table.columns[i], header_style="dim", justify=justify, overflow="fold")
        for row in table.rows:
            # The option of this command, where a note names the argument of ``convert``.
            grid.add_row(*(escape(row[i].replace("layer_norm=", "--layer-norm")) for i in columns))
        console.print(grid)
        console.print()
    for line in diagnosis.summary():
        console.print(escape(line), soft_wrap=True)
