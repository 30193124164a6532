"""What the site shows beside ``docs/``: the examples with their pictures, the experiments, the papers of the project.

Pages link to files of the repository as they do on a code host (``../examples/angular.py``). Those files become pages
here, and the links are turned to them, so that the site is whole in itself.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAPERS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
_EVERY_NAME = re.compile(r"<!-- every name of ([\w.]+) -->")
_NAME = re.compile(r"(?<!\[)`((?:nm|normmatters)(?:\.\w+)+)`")
_LINK = re.compile(r"(!?)\[([^\]\[]*)\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")


def public_names(module: str) -> list[str]:
    """What a module's ``__all__`` says, read without importing it; of the ranks of a batch norm only ``2d``."""
    path = ROOT / "src" / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(statement.value) if not re.search(r"[13]d$", name)]
            # A function that has the name of its file would be taken for the file.
            return [f"{module}.{name}" + (f".{name}" if (path / f"{name}.py").exists() else "") for name in names]
    raise ValueError(f"{source} has no __all__")


_PUBLIC = {name.rpartition(".")[2] for name in public_names("normmatters")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty lists of the nav with what there is: recipes, examples, experiments."""
    recipes = sorted(path.name for path in (ROOT / "docs" / "recipes").glob("*.md") if path.name != "index.md")
    _section(config.nav, "Recipes").extend(["recipes/index.md", *(f"recipes/{name}" for name in recipes)])
    _section(config.nav, "Examples").extend(["examples/index.md", *(f"examples/{p.stem}.md" for p in _examples())])
    _section(config.nav, "Experiments").extend(
        ["experiments/index.md", *(f"experiments/{folder.name}.md" for folder in _experiments())]
    )
    paper = _section(config.nav, "The paper")
    if (ROOT / "docs" / "results.md").exists():
        paper.insert(1, {"Results": "results.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside ``docs/``."""
    pages = {"examples/index.md": _gallery(), "experiments/index.md": _experiment_list()}
    pages |= {f"examples/{script.stem}.md": _example(script) for script in _examples()}
    pages |= {f"experiments/{folder.name}.md": _experiment(folder) for folder in _experiments()}
    pages |= {
        page: _of_the_site((ROOT / name).read_text(encoding="utf-8"), name)
        for name, page in PAPERS.items()
        if name != "README.md"
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository to their pages, and fill in the names that an API page is to show."""
    if page.file.generated_by:
        return markdown
    markdown = _EVERY_NAME.sub(lambda match: "\n\n".join(f"::: {name}" for name in public_names(match[1])), markdown)
    return _linked_names(_of_the_site(markdown, "docs/" + page.file.src_uri))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """The front page is called Home in the nav, whatever its heading."""
    if nav.homepage is not None:
        nav.homepage.title = "Quickstart"
    return nav


def _of_the_site(markdown: str, source: str) -> str:
    """``markdown`` of the repository's file ``source``, its links as they are on the site."""
    here = PAPERS.get(source, source.removeprefix("docs/"))

    def turned(match: re.Match[str]) -> str:
        start, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        page = _page_of(target)
        if page is not None:
            return f"{start}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        return text if (ROOT / target).exists() else match[0]  # a file that the site does not show: its name alone

    return _LINK.sub(turned, markdown)


def _linked_names(markdown: str) -> str:
    """Names of the library in inline code lead to their place on the API pages."""
    places = _places()

    def linked(match: re.Match[str]) -> str:
        place = places.get(match[1])
        return f"[{match[0]}][{place}]" if place else match[0]

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else _NAME.sub(linked, part) for index, part in enumerate(parts))


def _places() -> dict[str, str]:
    """From ``nm.L1BatchNorm2d`` to the id of its description."""
    places = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for module in _EVERY_NAME.findall(page.read_text(encoding="utf-8")):
            for name in public_names(module):
                tail = name.rpartition(".")[2]
                places |= {name: name, f"nm.{module.removeprefix('normmatters.')}.{tail}": name}
                if tail in _PUBLIC:
                    places[f"nm.{tail}"] = name
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


def _section(nav: Any, name: str) -> Any:
    """The list under this name, wherever it is in the nav; None if there is none."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            found = value if title == name else _section(value, name) if isinstance(value, list) else None
            if found is not None:
                return found
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


def _experiment_list() -> str:
    rows = "\n".join(
        f"| [{folder.name}]({folder.name}.md) | {', '.join(sorted(cell.stem for cell in folder.glob('*.toml')))} |"
        for folder in _experiments()
    )
    return (
        "# Experiments\n\nOne TOML file for each cell of the paper's figures and tables; "
        "`normmatters reproduce NAME` runs them.\n\n| Experiment | Cells |\n|---|---|\n" + rows + "\n"
    )


def _experiment(folder: Path) -> str:
    cells = sorted(folder.glob("*.toml"))
    bases = sorted({ROOT / "experiments" / name for cell in cells for name in _bases(cell)})
    blocks = "\n\n".join(
        f'## {path.stem}\n\n```toml title="experiments/{path.relative_to(ROOT / "experiments").as_posix()}"\n'
        f"{path.read_text(encoding='utf-8')}```"
        for path in [*cells, *bases]
    )
    small = any("only = [" not in cell.read_text(encoding="utf-8") for cell in cells)  # the rest has no quick preset
    command = f"normmatters reproduce {folder.name} --preset {'quick' if small else 'cifar'}"
    return f"# {folder.name}\n\n```bash\n{command}\n```\n\n{blocks}\n"


def _bases(cell: Path) -> list[str]:
    return re.findall(r'^extends = "\.\./(.+?)"', cell.read_text(encoding="utf-8"), re.MULTILINE)
