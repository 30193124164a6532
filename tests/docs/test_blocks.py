"""What the pages tell a reader to type: every Python block runs, every command line is one that there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command

from normmatters import bench
from normmatters.bench.__main__ import main as bench_main
from normmatters.cli import app
from normmatters.kernels import backends
from normmatters.lab.cells import PRESETS, experiment_names, load_cell
from support.markdown_pages import PAGES, ROOT, blocks, name, read, run_blocks, spans

# A page about one of these is skipped where it is not installed; that anything else is missing is an error.
OPTIONAL = {
    *("accelerate", "datasets", "lightning", "matplotlib", "onnx", "onnxruntime", "onnxscript", "safetensors"),
    *("sklearn", "tensorboard", "timm", "torchao", "torchvision", "transformers"),
}
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(read(page)))]
WITH_PYTHON.remove(ROOT / "docs" / "tutorial.md")  # which tests/docs/test_tutorial.py runs, as a notebook


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # files that a block writes go here
    monkeypatch.setenv("MPLBACKEND", "Agg")
    try:
        states = run_blocks(page)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        pytest.skip(f"{package} is not installed")
    for value in states[-1].values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.isfinite().all()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A block without a language, or of an unknown one, would escape the test above."""
    languages = {block.language for block in blocks(read(page))}
    assert languages <= {"python", "pycon", "bash", "text", "toml", ""}
    for block in blocks(read(page)):
        if block.language in ("", "text", "bash"):
            assert not re.search(r"^(import \w|from \S+ import |>>> )", block.code, re.MULTILINE), block.line


def command_lines(text: str) -> list[str]:
    """Lines of shell blocks, with their continuations, and inline code."""
    shell = [block.code.replace("\\\n", " ") for block in blocks(text) if block.language in ("", "bash", "text")]
    return [line.strip().removeprefix("$ ") for code in shell for line in code.splitlines()] + spans(text)


def _check_normmatters(words: list[str], *, whole: bool) -> None:
    """Parse by the command's own parser: options must exist and have values of their type."""
    command = get_command(app)
    path = []
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no command {' '.join([*path, words[0]])}"
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    if not path or hasattr(command, "commands") or {"-h", "--help"} & set(words):
        return
    try:
        given = command.make_context(path[-1], [word for word in words if word != "--debug"]).params
    except typer.Exit:  # an option that does its work while it is read, as `doctor --env`
        return
    except Exception as error:
        if type(error).__name__ == "MissingParameter" and not whole:  # in a sentence: `normmatters reproduce`
            return
        raise AssertionError(f"normmatters {' '.join(path)} {' '.join(words)}: {error}") from error
    if path == ["reproduce"]:
        cells = {name for name in given["names"] if "/" in name}
        for name in cells:
            load_cell(name)
        assert {*given["names"]} - cells <= {*experiment_names(), "all", "NAME"}
        assert given["preset"] in PRESETS
    if path == ["train"] and given["config"].parts[0] == "experiments":
        assert (ROOT / given["config"]).is_file()
    if path == ["bench"]:
        assert set(given["names"] or []) <= set(bench.NAMES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda names, **options: asked.append((names, options)) or 0)
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    text = read(page)
    inline = set(spans(text))
    for line in command_lines(text):
        for target in re.findall(r"(?:^|&& )make ([a-z-]+)", line):
            assert target in targets, line
        match = re.match(r"(?:.*-m |.*/bin/)?normmatters(\.bench)? (.*)", line)
        if match is None or re.search(r"[A-Z]{3,}\b(?!=)", match[2].partition("#")[0]):  # NAME, MODEL: to be filled in
            continue
        words = shlex.split(match[2], comments=True)
        if match[1]:
            assert bench_main(words) == 0, line
            assert set(asked[-1][0]) <= set(bench.NAMES), line
        else:
            _check_normmatters(words, whole=line not in inline)


@pytest.mark.parametrize(
    "line",
    ["reproduce fig1 --sedes 3", "reproduce fig99", "frobnicate", "explain --lr much", "bench layer", "data get"],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        _check_normmatters(line.split(), whole=True)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_called_full_size_is_not_the_small_preset(page: Path) -> None:
    for command in re.findall(r"full size[^`]*`(normmatters reproduce [^`]*)`", read(page)):
        assert re.search(r"--preset (cifar|full)", command), command


def test_command_page_has_every_command() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    page = read(ROOT / "docs" / "cli.md")
    assert set(re.findall(r"^## `(\w+)`", page, re.MULTILINE)) == set(commands)
    for command in commands:
        assert re.search(rf"^normmatters {command} ", page, re.MULTILINE), command


def test_what_a_page_shows_of_an_output_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a command (`$ normmatters ...`) some lines may stand for all, and `…` for the rest."""
    shown = [(page, block) for page in PAGES for block in blocks(read(page)) if block.code.startswith("$ normmatters ")]
    assert len(shown) > 0
    for page, block in shown:
        command, *lines = block.code.splitlines()
        capsys.readouterr()
        get_command(app).main(shlex.split(command)[2:], standalone_mode=False)
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line != "…" and line not in printed] == [], name(page)


@pytest.mark.skipif(bool(backends.TRITON_MISSING), reason=backends.TRITON_MISSING or "")
def test_what_the_doctor_prints_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "recipes" / "doctor.md"
    run_blocks(page)
    assert capsys.readouterr().out in [block.code for block in blocks(read(page)) if block.language == "text"]
