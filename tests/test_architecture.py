"""The order of the house: imports run downwards, and each outside library has its doors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gptmini"
FLOORS = [
    ["errors"],
    ["yamlfile", "files"],
    ["config"],
    ["configfile", "planner"],
    ["bpe"],
    ["tokenizer"],
    ["formats"],
    ["corpus"],
    ["shards"],
    ["prepare", "fetch"],
    # the model
    ["mechanisms"],
    ["layers", "masks"],
    ["attention"],
    ["model"],
    ["native"],
    # machinery
    ["machine", "optim", "batches", "checkpoint", "runlog"],
    ["budget", "trackers", "dry_run"],
    # what it is for
    ["decoder", "filters"],
    ["speculate"],
    ["sampler"],
    ["run"],
    ["evaluate", "score", "bulk", "inspect"],
    ["measure"],
    ["plots", "compare"],
    ["report"],
    ["training"],
    ["convert", "trainer", "size"],
    # the door
    ["cli_options"],
    ["cli_text", "cli_generate", "cli_evidence"],
    ["cli"],
    ["__init__", "__main__"],
]
FLOOR = {name: height for height, floor in enumerate(FLOORS) for name in floor}
WITHOUT_TORCH = [name for name in FLOOR if FLOOR[name] <= FLOOR["prepare"]]
DOORS = {
    "pydantic": {"config", "configfile"},
    "pydantic_core": {"config"},
    "yaml": {"yamlfile"},
    "tiktoken": {"tokenizer"},
    "tqdm": {"runlog"},
    "safetensors": {"checkpoint"},
    "typer": {"cli", "cli_text", "cli_generate", "cli_evidence", "cli_options"},
    "subprocess": {"native", "compare"},
    "regex": {"bpe"},
    "pyarrow": {"formats"},
    "urllib": {"fetch"},
    "matplotlib": {"plots"},
    "wandb": {"trackers"},
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve"}

trees = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}


def imports(tree: ast.AST) -> list[tuple[str, str]]:
    """(module, name) of every import, wherever it stands."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def rooms_used(tree: ast.AST) -> set[str]:
    used = set()
    for module, name in imports(tree):
        if module == "gptmini":
            used.add(name)
        elif module.startswith("gptmini."):
            used.add(module.split(".")[1])
    return used


def test_every_room_has_a_floor():
    assert trees.keys() == FLOOR.keys()


@pytest.mark.parametrize("name", FLOOR)
def test_imports_run_downwards(name):
    above = {room for room in rooms_used(trees[name]) if FLOOR[room] >= FLOOR[name]}
    assert not above, f"{name} imports {above}"


def test_the_model_knows_no_machinery():
    for name in ("masks", "layers", "attention", "model"):
        assert rooms_used(trees[name]) <= {"config", "errors", "masks", "layers", "attention"}
    for room, users in {"trainer": {"cli"}, "mechanisms": {"inspect"}}.items():
        assert {name for name, tree in trees.items() if room in rooms_used(tree)} == users


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_its_doors(library):
    users = {
        name
        for name, tree in trees.items()
        if any(module.split(".")[0] == library for module, _ in imports(tree))
    }
    assert users == DOORS[library]


def test_nothing_can_run_code_from_a_file():
    for name, tree in trees.items():
        assert not {m.split(".")[0] for m, _ in imports(tree)} & FORBIDDEN_IMPORTS, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in FORBIDDEN_CALLS, name
                assert called not in ("torch.load", "yaml.load", "os.system"), name


def test_printing_and_environment_have_their_rooms():
    for name, tree in trees.items():
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
        assert not used & {"print", "os.environ", "os.getenv"} or name.startswith("cli"), name


def test_files_are_short():
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path.name


@pytest.mark.parametrize("name", [*WITHOUT_TORCH, "cli"])
def test_the_ground_floor_and_the_door_import_no_torch(name):
    check = f"import sys, gptmini.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
