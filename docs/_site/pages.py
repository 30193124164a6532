"""Write the site's source pages: those of ``docs/``, and pages made of the examples, the experiments and the API.

Pages link to files of the repository as they do on a code host (``../examples/angular.py``). Those files become pages
here, and the links are turned to them, so that the site is whole in itself.
Run: python docs/_site/pages.py build/docs
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAPERS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
_EVERY_NAME = re.compile(r"<!-- every name of ([\w.]+) -->")
_NAME = re.compile(r"(?<!\[)`((?:nm|normmatters)(?:\.\w+)+)`")
_LINK = re.compile(r"(!?)\[([^\]\[]*)\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)

# The tree beside every page: captions, pages in their order, and short titles. A page that is missing fails the build.
TREE = {
    "Start": {
        "tutorial": "Tutorial",
        "methods": "Every method",
        "cli": "Command line",
    },
    "Methods": {
        "batch_norm": "Batch norm",
        "batch_norm/l1": "Batch norm: L1",
        "batch_norm/linf_topk": "Batch norm: L∞ and Top(k)",
        "batch_norm/range_lp": "Batch norm: range and Lp",
        "batch_norm/mean_only": "Mean-only batch norm, TReLU",
        "batch_norm/sync": "Batch norm on many GPUs",
        "layer_norm": "Layer and RMS norm",
        "weight_norm": "Weight norm",
        "precision": "Half precision",
        "convert": "Converting a model",
    },
    "Norm and step size": {
        "optim/scale_invariance": "Scale invariance",
        "optim/norm_recorder": "Recorder",
        "optim/step_size_correction": "Step-size correction",
        "optim/norm_schedule": "Norm schedule",
        "optim/weight_decay_free": "Free of weight decay",
        "optim/angular": "Angular",
        "optim/corrected_decay": "Corrected weight decay",
        "optim/equilibrium": "Equilibrium",
    },
    "Use": {"recipes/index": "Recipes", "examples/index": "Examples", "api/index": "API"},
    "The paper": {
        "results": "Results",
        "paper-map": "The paper in code",
        "speed": "Speed and memory",
        "kernels": "Kernels",
        "experiments/index": "Experiments",
    },
    "The project": {"changelog": "Changelog", "contributing": "Contributing", "mutation": "Mutation check"},
}


def write(target: Path) -> None:
    """Fill ``target``, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("_site", "*.md"))
    pages = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    texts = {page: _from_docs(page, path.read_text(encoding="utf-8")) for page, path in pages.items()}
    texts |= {page: _linked(_read(name), name) for name, page in PAPERS.items() if name != "README.md"}
    texts |= {f"examples/{script.stem}.md": _example(script) for script in _examples()}
    texts |= {f"experiments/{folder.name}.md": _experiment(folder) for folder in _experiments()}
    texts |= {"examples/index.md": _gallery(), "experiments/index.md": _experiment_list()}
    for index in ("recipes", "examples", "experiments", "api"):
        names = sorted(page for page in texts if page.startswith(f"{index}/") and not page.endswith("/index.md"))
        tree = {posixpath.basename(name).removesuffix(".md"): "" for name in names}
        texts[f"{index}/index.md"] += _tree(None, tree)
    texts["index.md"] += "".join(_tree(caption, tree) for caption, tree in TREE.items())
    for page, text in texts.items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(text, encoding="utf-8")


def public_names(module: str) -> list[str]:
    """What a module's ``__all__`` says, read without importing it; of the ranks of a batch norm only ``2d``."""
    path = ROOT / "src" / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(statement.value) if not re.search(r"[13]d$", name)]
            return [f"{module}.{name}" for name in names]
    raise ValueError(f"{source} has no __all__")


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _tree(caption: str | None, pages: dict[str, str]) -> str:
    lines = [f"{title} <{page}>" if title else page for page, title in pages.items()]
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "", "```{toctree}", *head, "", *lines, "```", ""])


def _from_docs(page: str, text: str) -> str:
    """A page of ``docs/``: links turned, names of the library linked, and the API's names filled in."""
    text = _EVERY_NAME.sub(lambda match: "\n".join(map(_described, public_names(match[1]))), text)
    return _linked_names(_linked(text, f"docs/{page}"))


def _described(name: str) -> str:
    """The directive that describes one public name from its docstring."""
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module), last)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    return f"## {last}\n\n```{{eval-rst}}\n.. auto{kind}:: {name}\n```\n"


def _linked(text: str, source: str) -> str:
    """``text`` of the repository's file ``source``, its links as they are on the site."""
    here = PAPERS.get(source, source.removeprefix("docs/"))

    def turned(match: re.Match[str]) -> str:
        start, words, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        page = _page_of(target)
        if page is not None and not (target == "README.md" and anchor):  # the front page has other headings
            return f"{start}[{words}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        return words if (ROOT / target).exists() else match[0]  # a file that the site does not show: its name alone

    return _LINK.sub(turned, text)


def _linked_names(text: str) -> str:
    """Names of the library in inline code lead to their place on the API pages."""
    places = _places()

    def linked(match: re.Match[str]) -> str:
        place = places.get(match[1])
        return f"{{py:obj}}`{match[1]} <{place}>`" if place else match[0]

    parts = _FENCE.split(text)
    return "".join(part if index % 2 else _NAME.sub(linked, part) for index, part in enumerate(parts))


def _places() -> dict[str, str]:
    """From ``nm.L1BatchNorm2d`` to the name under which the API describes it."""
    top = {name.rpartition(".")[2] for name in public_names("normmatters")}
    places = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for module in _EVERY_NAME.findall(page.read_text(encoding="utf-8")):
            for name in public_names(module):
                last = name.rpartition(".")[2]
                places |= {name: name, f"nm.{module.removeprefix('normmatters.')}.{last}": name}
                if last in top:
                    places[f"nm.{last}"] = name
    return places


def _page_of(target: str) -> str | None:
    """The page for a file of the repository; None if there is none."""
    if target in PAPERS:
        return PAPERS[target]
    if target == "docs":
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if match := re.fullmatch(r"examples/(\w+)\.py", target):
        return f"examples/{match[1]}.md"
    if target in ("examples", "experiments"):
        return f"{target}/index.md"
    if match := re.match(r"experiments/(\w+)(/|$)", target):
        return f"experiments/{match[1]}.md"
    return None


def _examples() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))


def _experiments() -> list[Path]:
    return sorted(path for path in (ROOT / "experiments").iterdir() if path.is_dir())


def _title(script: Path) -> str:
    """The docstring of a script without its last sentence, which says how to run it."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.stem
    return text.partition(" Run: ")[0].rstrip(".")


def _example(script: Path) -> str:
    return (
        f"# {_title(script)}\n\n```bash\npython examples/{script.name} plot.png\n```\n\n"
        f"![{_title(script)}](../img/{script.stem}.png)\n\n"
        f"```python\n{script.read_text(encoding='utf-8')}```\n"
    )


def _gallery() -> str:
    cards = "\n\n".join(
        f"## [{_title(script)}]({script.stem}.md)\n\n[![{_title(script)}](../img/{script.stem}.png)]({script.stem}.md)"
        for script in _examples()
    )
    intro = "Short scripts on small data: each runs in seconds on one core and ends with a plot."
    return f"# Examples\n\n{intro}\n\n{cards}\n"


def _figures() -> dict[str, dict[str, str]]:
    """Title and topic of each experiment."""
    return {table["name"]: table for table in tomllib.loads(_read("experiments/figures.toml"))["experiment"]}


def _experiment_list() -> str:
    figures = _figures()
    rows = "\n".join(
        f"| [{figures[folder.name]['title']}: {figures[folder.name]['topic']}]({folder.name}.md) | `{folder.name}` "
        f"| {', '.join(sorted(cell.stem for cell in folder.glob('*.toml')))} |"
        for folder in _experiments()
    )
    return (
        "# Experiments\n\nOne TOML file for each cell of the paper's figures and tables; "
        "`normmatters reproduce NAME` runs them.\n\n| Experiment | NAME | Cells |\n|---|---|---|\n" + rows + "\n"
    )


def _experiment(folder: Path) -> str:
    about, cells = _figures()[folder.name], sorted(folder.glob("*.toml"))
    bases = sorted({ROOT / "experiments" / name for cell in cells for name in _bases(cell)})
    blocks = "\n\n".join(
        f"## {path.stem}\n\n`experiments/{path.relative_to(ROOT / 'experiments').as_posix()}`\n\n"
        f"```toml\n{path.read_text(encoding='utf-8')}```"
        for path in [*cells, *bases]
    )
    small = any("only = [" not in cell.read_text(encoding="utf-8") for cell in cells)  # the rest has no quick preset
    command = f"normmatters reproduce {folder.name} --preset {'quick' if small else 'cifar'}"
    head = f"# {about['title']}: {about['topic']}\n\n{about['shows'].strip()}"
    return f"{head}\n\n```bash\n{command}\n```\n\n{blocks}\n"


def _bases(cell: Path) -> list[str]:
    return re.findall(r'^extends = "\.\./(.+?)"', cell.read_text(encoding="utf-8"), re.MULTILINE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
