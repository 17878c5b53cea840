"""The architecture, checked on the source: which module imports which, and the exports of modules."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from suites.programs import run_python

import packer
from cache.errors import MissingExtraError
from packer.testing.samples import Samples

ROOT = Path(packer.__file__).resolve().parent.parent
LAYERS = ("cache", "readers", "packer")  # each layer may import itself and the layers before it
HEAVY = ("click", "h5py", "torch", "PIL", "zstandard", "pyarrow", "webdataset", "tfrecord", "packer")
OPTIONAL = (
    "torch", "lmdb", "pyarrow", "yaml", "webdataset", "tfrecord", "tensorflow", "nvidia", "mpi4py", "dask",
    "distributed", "ray", "amd", "obstore", "matplotlib", "jinja2", "lightning", "pytorch_lightning", "timm",
    "transformers", "urllib3", "scipy", "pillow_heif", "pillow_jxl", "prometheus_client",
)  # fmt: skip
GPU = ("triton", "torchcodec", "torchvision", "pynvml", "amdsmi")
ALLOWED = {  # third-party packages that a layer may import, lazily or not
    "cache": {"numpy", "crc32c", "mpi4py", "obstore", "psutil"},
    "readers": {"numpy", "crc32c", "simplejpeg", "PIL", "torch", "zstandard", "amd", "nvidia", "lightning",
                "pytorch_lightning", "timm", "transformers", "pillow_heif", "pillow_jxl", "prometheus_client", *GPU},
    "packer": {"numpy", "crc32c", "h5py", "click", "lazy_loader", "packaging", "PIL", "zstandard", "lmdb", "pyarrow",
               "matplotlib", "jinja2", "urllib3", "yaml", "scipy", "mpi4py", "dask", "distributed", "ray"},
}  # fmt: skip
ALLOWED["packer.tools"] = ALLOWED["packer"] | {"torch", "psutil", "pynvml", "amdsmi", "matplotlib", "jinja2"}
# Modules that run on torch; all others must work without it. `import readers` loads none of them.
ON_TORCH = (
    "readers.torch", "readers.loader", "readers.augment.cpu", "readers.augment.fused", "readers.augment.kernel",
    "readers.coefficients.device", "readers.collate", "readers.decode.batch", "readers.decode.device",
    "readers.frameworks.lightning", "readers.frameworks.transformers", "readers.metrics", "packer.tools.diagnose.cuts",
    "packer.tools.diagnose.dataloader", "packer.tools.diagnose.imageloader", "packer.tools.diagnose.tiers",
    "packer.tools.parity",
)  # fmt: skip
KERNELS = (
    "readers.augment.kernel",
    "readers.coefficients.device.kernels",
)
# Their classes derive from those of the frameworks.
FRAMEWORKS = ("readers.frameworks.lightning", "readers.frameworks.transformers")
# Imports that functions may have besides optional packages, and the reason; a name includes everything below it.
LAZY = {
    "psutil": "systems without /proc/meminfo",
    "PIL": "21 ms; decoders seldom need it",
    "cache.checksums": "imports crc32c and numpy",
    "cache.stores.copied": "16 ms: staging",
    "concurrent.futures": "13 ms",
    "multiprocessing": "16 ms, with concurrent.futures; few trees are large",
    "crc32c": "37 ms: it reads the metadata of installed distributions",
    "importlib.metadata": "37 ms; only messages need it",
    "packer.cli.group": "43 ms, in which Ctrl-C must end the process at once",
    "cache.plugins": "importlib.metadata, as above; few machines have commands or stores of other packages",
    "packer.formats": "up to 60 ms each: h5py",
    "packer.sources": "up to 50 ms each: h5py, zipfile, tarfile",
    "readers.augment": "14 ms and more; kernels need triton",
    "readers.collate": "torch",
    "readers.coefficients": "crc32c, as below; few caches keep coefficients",
    "readers.caching.form": "60 ms: decoders",
    "readers.decode.device": "torch",
    "packer.tools.diagnose.dataloader": "torch",
    "readers.opening.tree": "16 ms: multiprocessing, concurrent.futures; few trees are large",
    "readers.headers": "6 ms: 12 modules; an index has the header facts",
    "readers.loader": "torch",
    "readers.order.base": "numpy's random generators, for readers that never shuffle",
    "packer.tools.parity": "torch",
    "readers.torch": "torch",
    "readers.opening.remote": "30 ms: subprocess, concurrent.futures",
    "zstandard": "9 ms; few caches and archives are compressed",
}
# Crash-safe writing takes fsync and rename in the right order, so only one module does it.
DURABLE = re.compile(r"\bos\.(replace|rename|renames|fsync|fdatasync)\b")
# Without packer.testing, whose suites run under pytest and may import everything.
MODULES = sorted(
    path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if path.parent != ROOT / "packer/testing"
)


@functools.cache
def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, *, lazy: bool = True, types: bool = True) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import statement. `from . import` counts with the full name.

    lazy: include imports inside functions. types: include imports for the type checker alone, which needs lazy.
    """
    return tuple(_imports(path, lazy, types))


def _imports(path: Path, lazy: bool, types: bool) -> Iterator[tuple[int, str]]:
    tree = parsed(path)
    nodes = ast.walk(tree) if lazy and types else statements(tree, functions=lazy)
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def of_each_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all modules, which names each failing module: a test for each would take five times as long."""

    def test() -> None:
        wrong = []
        for path in MODULES:
            try:
                check(path)
            except AssertionError as error:
                wrong.append(str(error).partition("\n")[0])
        assert not wrong, "\n".join(wrong)

    test.__doc__ = check.__doc__
    return test


def statements(tree: ast.Module, *, functions: bool) -> Iterator[ast.AST]:
    """Statements that run at import, and in functions on request; not those under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = iter(node.orelse)
        if functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [child for child in children if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))]


def test_modules_and_their_imports_are_found() -> None:
    """A test over no modules, or one that found no imports, would pass."""
    assert len(MODULES) > 40 and {"packer.formats.tar", "readers.reader", "cache"} <= NAMES
    whole, at_import = (dict(imports(ROOT / "readers/reader.py", lazy=lazy)).values() for lazy in (True, False))
    assert set(at_import) < set(whole)


@of_each_module
def test_imports_point_down(path: Path) -> None:
    layer = name_of(path).partition(".")[0]
    below = LAYERS[: LAYERS.index(layer) + 1]
    for line, module in imports(path):
        top = module.partition(".")[0]
        assert top not in LAYERS or top in below, f"{path}:{line} imports {module}: {layer} must not import {top}"
        room = "packer.tools" if name_of(path).startswith("packer.tools") else layer
        known = top in LAYERS or top in sys.stdlib_module_names or top in ALLOWED[room]
        assert known, f"{path}:{line} imports {module}, which {layer} cannot import"


@of_each_module
def test_only_the_command_line_imports_tools(path: Path) -> None:
    name = name_of(path)
    if not name.startswith(("packer.cli", "packer.tools.report", "packer.tools")) and name != "packer":
        for line, module in imports(path):
            assert not module.startswith("packer.tools"), f"{path}:{line} imports {module}, a tool"


@of_each_module
def test_only_tests_import_the_suites(path: Path) -> None:
    for line, module in imports(path):
        assert not module.startswith("packer.testing"), f"{path}:{line} imports {module}, which needs pytest"


@of_each_module
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    """click only by the command line, h5py only by the HDF5 modules, Pillow and optional packages only in functions."""
    name = name_of(path)
    at_import = {module.partition(".")[0] for _, module in imports(path, lazy=False)}
    if not name.startswith("packer.cli"):
        assert "click" not in at_import, f"{path} imports click"
    if "hdf5" not in name:
        assert "h5py" not in at_import, f"{path} imports h5py"
    if name.startswith(ON_TORCH):
        at_import.discard("torch")
    if name in KERNELS:  # a kernel is compiled from the text of its module
        at_import.discard("triton")
    if name in FRAMEWORKS:
        at_import -= {"lightning", "pytorch_lightning", "transformers"}
    optional = {"PIL", *OPTIONAL, *GPU}
    assert not at_import & optional, f"{path} imports {at_import & optional} when it is imported"


def test_the_library_does_not_import_its_command_line() -> None:
    for path in MODULES:
        if not name_of(path).startswith(("packer.cli", "packer.__main__")):
            wrong = [(line, module) for line, module in imports(path) if module.startswith("packer.cli")]
            assert not wrong, f"{path} imports the command line: {wrong}"


@of_each_module
def test_imports_in_functions_have_a_reason(path: Path) -> None:
    """An optional package, or a measured import time; other imports belong at the top."""
    at_import, all_imports = set(imports(path, lazy=False)), set(imports(path, types=False))
    for line, module in sorted(all_imports - at_import):
        parts = module.split(".")
        above = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if not above & {*LAZY, *OPTIONAL, *GPU}:
            raise AssertionError(f"{path}:{line} imports {module} in a function: import it at the top, or say why not")


def test_files_are_made_durable_in_one_place() -> None:
    """`cache.files` writes, syncs and renames; `cache.filesystem.drop` syncs to get clean pages."""
    for path in MODULES:
        if name_of(path) not in ("cache.files", "cache.filesystem"):
            call = DURABLE.search(path.read_text(encoding="utf-8"))
            assert call is None, f"{path} calls {call[0]}: use cache.files" if call else ""


def test_locks_and_batch_systems_are_handled_in_one_place() -> None:
    """flock and the variables of launchers; examples and messages may name the latter."""
    launcher = re.compile(r"SLURM_|OMPI_|PMI_|PBS_|LSB_|LSF_|FLUX_|JSM_|LOCAL_RANK|WORLD_SIZE\b|GROUP_RANK")
    for path in MODULES:
        nodes = list(ast.walk(parsed(path)))
        documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in documents]
        if name_of(path) != "cache.launchers":
            named = [text for text in texts if isinstance(text, str) and launcher.match(text)]
            assert not named, f"{path} names {named}: ask cache.launchers"
        if name_of(path) not in ("cache.system", "cache.locks", "cache.shared.file"):  # the last one seals memory
            taken = [node for node in nodes if isinstance(node, ast.alias) and node.name == "fcntl"]
            assert not taken, f"{path} imports fcntl: use cache.locks"


def test_no_import_cycles() -> None:
    """Among all imports, including those in functions and for the type checker; a package stands for its __init__."""
    names = {name_of(path): path for path in MODULES}
    graph = {
        name: {module for _, module in imports(path) if module in names and module != name}
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"an import cycle: {' -> '.join((*above[above.index(name) :], name))}"
        if name not in done:
            for module in sorted(graph[name]):
                visit(module, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


@pytest.mark.parametrize(
    "modules",
    [
        "cache, cache.staging.session, cache.remote",
        "readers, readers.augment, readers.coefficients, readers.dali, readers.decode, readers.order, "
        "readers.opening.remote, readers.rocal",
        "packer",
    ],
)
def test_packages_that_an_import_loads(modules: str) -> None:
    """In a fresh interpreter: training code imports `readers` in every worker."""
    script = f"import sys, {modules}; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = run_python("-W", "error", "-c", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded, layer = set(done.stdout.split()), modules.partition(",")[0]
    above = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = loaded & {*(OPTIONAL if layer == "packer" else HEAVY), "click", "h5py", "PIL", *above}
    assert layer in loaded and not wrong, f"import {modules} loads {wrong}"


def test_reading_a_local_set_loads_few_modules(samples: Samples) -> None:
    """Every worker imports `readers`: at most 30 of its modules, and opening and reading a local set loads no more."""
    script = f"""
import sys, readers
ours = lambda: {{name for name in sys.modules if name.partition(".")[0] in ("cache", "readers")}}
imported = ours()
readers.open({str(samples.packed())!r}, "train")[0]
print(len(imported), *sorted(ours() - imported))
print(*sorted(name for name in readers.__all__ if name not in dir(readers) or not hasattr(readers, name)))
"""
    imported, missing = run_python("-c", script, cwd=ROOT, check=True).stdout.splitlines()
    assert int(imported.split()[0]) <= 30 and not imported.split()[1:] and not missing, (imported, missing)


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module binds at import; some of those of its classes, too."""
    for node in statements(tree, functions=False):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def written_exports(tree: ast.Module) -> list[str] | None:
    """`__all__` where it is one literal. Importing a module may compile it, or load packages for seconds."""
    assignments = (node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)))
    lists = [node.value for node in assignments if ast.unparse(node).startswith("__all__")]
    try:
        return list(ast.literal_eval(lists[0])) if len(lists) == 1 and lists[0] else None
    except ValueError:
        return None


@functools.cache
def exports(module: str) -> list[str] | None:
    path = next(path for path in MODULES if name_of(path) == module)
    names = written_exports(parsed(path))
    if "__all__" not in set(defined(parsed(path))):
        return None
    try:
        return getattr(importlib.import_module(module), "__all__", None) if names is None else names
    except MissingExtraError:
        return None


@of_each_module
def test_a_module_states_its_purpose_and_exports(path: Path) -> None:
    """A docstring; and in a package, or a module with a list, `__all__` of names that exist and are not private."""
    tree = parsed(path)
    assert (ast.get_docstring(tree) or "").strip(), f"{path} has no docstring"
    defines = any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.ImportFrom)) for node in tree.body)
    if path.name == "__main__.py" or (path.name == "__init__.py" and not defines):
        return
    names, exported = set(defined(tree)), written_exports(tree)
    if "__all__" in names and not (exported and names.issuperset(exported)):  # computed, or names made on access
        try:
            module = importlib.import_module(name_of(path))
        except MissingExtraError:
            return
        exported = getattr(module, "__all__", None)
        names |= {name for name in exported or () if hasattr(module, name)}
    assert exported is not None or path.name != "__init__.py", f"{path} has no __all__"
    if exported is None:  # private names begin with an underscore
        return
    missing = [name for name in exported if name not in names]
    assert not missing, f"{path} exports {missing}, which it does not have"
    assert len(set(exported)) == len(exported), f"{path} exports a name twice"
    private = [name for name in exported if name.startswith("_") and name != "__version__"]
    assert not private, f"{path} exports {private}"


@of_each_module
def test_public_names_are_exported(path: Path) -> None:
    """A class or function that another module imports is in the __all__ of its module."""
    for line, module in imports(path):
        base, _, name = module.rpartition(".")
        if base not in NAMES or module in NAMES or name == "*" or name.startswith("_"):
            continue
        exported = exports(base)
        if exported is not None:
            assert name in exported, f"{path}:{line} imports {name}, which {base} does not export"


def test_private_names_stay_in_their_module() -> None:
    for path in MODULES:
        for line, module in imports(path):
            base, _, name = module.rpartition(".")
            private = name.startswith("_") and not name.startswith("__") and base.partition(".")[0] in LAYERS
            assert not private, f"{path}:{line} imports the private {module}"


def test_the_version_is_the_same_in_both_places() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    assert match is not None and match[1] == packer.__version__, "pyproject.toml and packer.__version__ differ"


def test_every_package_is_typed_and_shipped() -> None:
    for layer in LAYERS:
        assert (ROOT / layer / "py.typed").is_file(), f"{layer} has no py.typed"
        for folder in {path.parent for path in MODULES if name_of(path).partition(".")[0] == layer}:
            assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py, so setuptools leaves it out"
