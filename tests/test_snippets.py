"""The code of README.md and docs runs as printed, and names in the texts exist (suites/snippets.py)."""

from __future__ import annotations

import ast
import gc
import re
import warnings
from pathlib import Path

import click
import pytest
from suites.snippets import RUN, Page, Place, blocks_of

from packer.cli.group import cli

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted({*ROOT.glob("docs/**/*.md")} - {*ROOT.glob("docs/reference/*")}),
    ROOT / "examples/README.md",
]
WITH_CODE = [page for page in PAGES if any(block.language in RUN for block in blocks_of(page))]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("snippets"))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """The environment of a page: no file of the user is read or written."""
    for name in ("home", "tmp", "scratch"):
        (tmp_path / name).mkdir()
    for name in ("PACKER_TRACEBACK", "SLURM_JOB_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    values = {"HOME": "home", "TMPDIR": "tmp", "SLURM_TMPDIR": "scratch", "XDG_CACHE_HOME": "home/cache"}
    for name, folder in values.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name, value in {"COLUMNS": "110", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    return Page(tmp_path / "bin")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(
    path: Path, place: Place, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.copy(blocks_of(path), tmp_path / "place")
    monkeypatch.syspath_prepend(str(tmp_path / "place"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for block in blocks_of(path):
            monkeypatch.chdir(tmp_path / "place")
            try:
                page.do(block)
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
        page.names.clear()
        gc.collect()


def spans(path: Path) -> list[str]:
    """The inline code of a page."""
    text = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {name: command for name in cli.list_commands(context) if (command := cli.get_command(context, name))}


def options_of(command: click.Command) -> set[str]:
    parts = [options_of(part) for part in getattr(command, "commands", {}).values()]
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)}.union(*parts)


OPTIONS = {name: {"--help", "-h", "--version"} | options_of(command) for name, command in commands().items()}
SCRIPTS = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
THEIRS = {  # options of our scripts
    option for path in SCRIPTS for option in re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text(encoding="utf-8"))
} | {  # keywords of `main` of the benchmarks
    f"--{keyword.arg}".replace("_", "-")
    for path in (ROOT / "benchmarks").glob("*.py")
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "main"
    for keyword in call.keywords
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_and_options_in_the_text_exist(path: Path) -> None:
    every = set().union(*OPTIONS.values()) | THEIRS
    for code in spans(path):
        words = code.partition(" -- ")[0].split()
        options = {match[0] for word in words if (match := re.match(r"--[a-z][a-z0-9-]*", word))}
        if words[:1] == ["packer"] and len(words) > 1 and re.fullmatch("[a-z][a-z-]+", words[1]):
            assert words[1] in OPTIONS, f"{path.name}: `{code}`: there is no such command"
            assert options <= OPTIONS[words[1]], f"{path.name}: `{code}`: {options - OPTIONS[words[1]]}"
        elif words[:1] == ["packer"] or code.startswith("--"):
            assert options <= every, f"{path.name}: `{code}`: no command of packer has {options - every}"
