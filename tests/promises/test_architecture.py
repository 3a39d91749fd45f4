"""The layout of the package: folders whose imports point one way, parts, and what never loads.

A folder of gptmini/ imports only the folders listed before it, in the order in which
docs/reading-the-code.md describes them. A part is a folder of gptmini/extras/: only a few functions
load it, and it knows no other part. Its command.py is a command, as the files of cli/ are; cli/app
registers those that are there. A new file needs no entry here.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gptmini

PACKAGE = Path(__file__).parents[2] / "gptmini"
GROUND = {"errors", "files", "console", "machine", "doors"}  # the modules directly in gptmini/
FOLDERS = [
    "",  # the ground
    "config",
    "tokenizer",
    "data",
    "model",
    "runs",
    "generate",
    "plan",
    "train",
    "cli",
]
PARTS = [
    "extras.engine",
    "extras.parallel",
    "extras.page",
    "extras.compare",
    "extras.convert",
    "extras.interop",
    "extras.serve",
    "extras.sources",
    "extras.plans",
    "extras.plots",
]
# The only functions outside of parts that import a part: the file of each, its name, the part.
# Where the part is deleted, each says in a line what is missing, or does without.
LOADERS = {
    ("doors", "load_pages", "extras.page"),
    ("doors", "load_plots", "extras.plots"),
    ("doors", "load_replicas", "extras.parallel"),
    ("generate.engine", "open_engine", "extras.engine"),
    ("generate.run", "_generate_tokens", "extras.engine"),
    ("generate.run", "find_copies", "extras.sources"),
    ("tokenizer.load", "_adopt_file", "extras.interop"),
    ("train.group", "join_group", "extras.parallel"),
}
# The public names whose home is a part; `gptmini/__init__.py` imports it when one is first used.
PART_NAMES = {"compare", "export_run", "import_model"}
IMPORTERS = {  # the only modules that import a library
    "pydantic": {"config.section", "config.settings", "config.load"},
    "pydantic_core": {"config.section"},
    "yaml": {"config.yamlfile"},
    "tiktoken": {"tokenizer.bpe_tokenizer"},
    "regex": {"tokenizer.bpe"},
    "pyarrow": {"data.formats"},
    "urllib": {"data.fetch"},
    "huggingface_hub": {"data.hub"},
    "tqdm": {"console", "train.progress_bar"},
    "rich": {"console", "extras.plots.plots", "extras.compare.plots"},
    "safetensors": {"runs.tensors", "extras.interop.huggingface"},
    "gguf": {"extras.interop.gguf"},
    "tensorboard": {"runs.log"},
    "wandb": {"runs.log"},
    "matplotlib": {"extras.plots.plots"},
    "scipy": {"extras.compare.statistics"},
    "subprocess": {"machine", "extras.engine.build"},
    "jinja2": {"tokenizer.chat_template"},
    "starlette": {"extras.serve.server"},
    "uvicorn": {"extras.serve.connection", "extras.serve.server"},
    "prometheus_client": {"extras.serve.server"},
    "typer": {"cli.app", "cli.options", "cli.data", "cli.tokenizer"},
}
NEVER_LOADS = {  # importing the module on the left loads none of those on the right
    "gptmini.train.loop": ["gptmini.data.formats", "gptmini.extras"],
    "gptmini.train.step": [
        "gptmini.plan",
        "gptmini.runs",
        "gptmini.train.group",
        "gptmini.machine",
    ],
    "gptmini.extras.plots.plots": ["gptmini.train", "torch"],
    "gptmini.extras.compare.variants": ["gptmini.train", "torch"],
    "gptmini": ["torch"],
    "gptmini.cli.app": ["torch"],
    "gptmini.plan.cost": ["torch"],
    "gptmini.console": ["torch"],
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve"}
CONSOLE_ONLY = {"print", "sys.stdout", "sys.stderr", "os.environ", "os.getenv"}


def name_of(path: Path) -> str:
    """`model.gpt` for gptmini/model/gpt.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def folder_of(name: str) -> str:
    """`generate` for generate.engine, `extras.serve` for extras.serve.server."""
    parts = name.split(".")[:-1]
    return ".".join(parts[:2]) if parts[:1] == ["extras"] else "".join(parts[:1])


def is_command(name: str) -> bool:
    return folder_of(name) == "cli" or name.endswith(".command")


SOURCES = {name_of(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
FILES = [name for name in TREES if not name.endswith(("__init__", "__main__"))]
for name in FILES:
    if folder_of(name) in ("config", "tokenizer", "data"):
        NEVER_LOADS[f"gptmini.{name}"] = ["torch", "gptmini.model"]


def imports_of(tree: ast.AST) -> list[str]:
    """The dotted names that a module or a function imports, wherever the import stands."""
    dotted = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{node.module} is imported from a relative place"
            dotted += [f"{node.module}.{alias.name}" for alias in node.names]
    return dotted


def imported_files_of(tree: ast.AST) -> set[str]:
    """The modules of gptmini that a module or a function imports: {"config.settings", "errors"}."""
    ours = [dotted.removeprefix("gptmini.") for dotted in imports_of(tree)]
    return {file for file in FILES for dotted in ours if f"{dotted}.".startswith(f"{file}.")}


@cache
def imports(name: str) -> list[str]:
    return imports_of(TREES[name])


@cache
def imported_files(name: str) -> set[str]:
    return imported_files_of(TREES[name])


def test_every_file_is_in_a_folder():
    assert {name for name in FILES if folder_of(name) == ""} == GROUND
    assert {folder_of(name) for name in FILES} == {*FOLDERS, *PARTS}


def test_the_folders_are_described_in_their_order():
    page = (PACKAGE.parent / "docs" / "reading-the-code.md").read_text()
    order = [*FOLDERS[1:], *(part.replace(".", "/") for part in PARTS)]
    assert re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE) == order


@pytest.mark.parametrize("name", FILES)
def test_a_folder_imports_only_folders_before_it_and_a_few_functions_load_parts(name):
    folder = folder_of(name)
    if folder in PARTS:
        allowed = [*(FOLDERS if is_command(name) else FOLDERS[:-1]), folder]
    else:
        allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    allowed += [part for file, _, part in LOADERS if file == name]
    assert {file for file in imported_files(name) if folder_of(file) not in allowed} == set()


def test_the_core_meets_its_parts_in_few_functions():
    """Imports for annotations aside, which never run."""
    loaders = set()
    for name in FILES:
        if folder_of(name) in PARTS:
            continue
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.FunctionDef):
                parts = {folder_of(file) for file in imported_files_of(node)} & {*PARTS}
                loaders |= {(name, node.name, part) for part in parts}
    assert loaders == LOADERS
    homes = gptmini._HOMES.items()
    assert {name for name, home in homes if home.startswith("extras.")} == PART_NAMES


@pytest.mark.parametrize("folder", [*FOLDERS, *PARTS])
def test_a_folder_has_no_circles(folder):
    graph = {
        name: {file for file in imported_files(name) if folder_of(file) == folder}
        for name in FILES
        if folder_of(name) == folder
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("folder", [*FOLDERS[1:], "extras", *PARTS])
def test_a_folder_begins_with_a_docstring_and_nothing_else(folder):
    (only,) = TREES[f"{folder}.__init__"].body
    assert isinstance(only, ast.Expr)
    assert ast.get_docstring(TREES[f"{folder}.__init__"])


def test_the_model_knows_only_its_settings_and_its_errors():
    for name in FILES:
        if folder_of(name) == "model":
            others = {file for file in imported_files(name) if folder_of(file) != "model"}
            assert others <= {"config.settings", "errors"}, name
            libraries = {dotted.split(".")[0] for dotted in imports(name)} - {
                "gptmini",
                "__future__",
            }
            assert libraries <= {"torch", "math", "copy", "typing", "contextlib", "collections"}


def test_mechanisms_are_for_readers_and_tests():
    users = {name for name in FILES if "model.mechanisms" in imported_files(name)}
    assert not users


@pytest.mark.parametrize("library", IMPORTERS)
def test_each_library_has_its_importers(library):
    users = {
        name
        for name in FILES
        for dotted in imports(name)
        if library in dotted.split(".") and not dotted.startswith("gptmini")
    }
    assert users == IMPORTERS[library]


def test_the_private_parts_of_torch_are_those_beside_its_bound():
    used = re.findall(r"\btorch\.(?:\w+\.)?(_foreach|_[a-z]\w*)", "".join(SOURCES.values()))
    reason = (PACKAGE.parent / "pyproject.toml").read_text().partition('"torch>=')[0]
    assert set(used) == set(re.findall(r"[ .](_foreach|_[a-z]\w*)", reason))


def test_the_server_stands_on_generating_alone():
    serving = [name for name in FILES if folder_of(name) == "extras.serve" and not is_command(name)]
    folders = {folder_of(file) for name in serving for file in imported_files(name)}
    assert folders <= {"", "config", "generate", "extras.serve"}


@pytest.mark.parametrize("others", {tuple(others): None for others in NEVER_LOADS.values()})
def test_importing_a_module_never_loads(others):
    """Those with the same list are imported in turn; the first to load one of it is named."""
    modules = [module for module, never in NEVER_LOADS.items() if tuple(never) == others]
    script = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        f"    if found := [m for m in {others} if m in sys.modules]:\n"
        "        sys.exit(f'{module} loads {found}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_no_file_can_make_it_run_code(name):
    assert not {dotted.split(".")[0] for dotted in imports(name)} & FORBIDDEN_IMPORTS
    calls = {ast.unparse(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)}
    assert not calls & FORBIDDEN_CALLS


@pytest.mark.parametrize("name", [name for name in FILES if not is_command(name)])
def test_only_the_console_prints_and_only_the_door_reads_the_environment(name):
    names = (ast.Name, ast.Attribute)
    used = {ast.unparse(node) for node in ast.walk(TREES[name]) if isinstance(node, names)}
    allowed = {
        "console": CONSOLE_ONLY,
        "train.group": {"os.environ"},  # torchrun's variables
        "extras.parallel.ranks": {"os.environ"},
        "extras.parallel.group": {"os.environ"},
        "extras.plots.plots": {"os.environ"},  # the one that matplotlib reads
        "machine": {"os.environ"},  # those that cuBLAS and OpenMP read
        "files": {"os.environ"},  # where the desktop keeps caches
    }
    assert not (used & CONSOLE_ONLY) - allowed.get(name, set())
