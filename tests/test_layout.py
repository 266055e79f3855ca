"""The layout: imports go one way, from defining files, in no circle; a package's ``__init__.py`` only re-exports."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_fed"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# A file imports from rooms of earlier lines and from its own room. Rooms of one line do not know each other.
ORDER = [
    ["errors", "argument_checks", "files", "messages"],
    ["numerics"],
    ["process_group"],
    ["model"],
    ["server", "client"],
    ["method"],
    ["data"],
    ["matching"],
    ["rounds"],
    ["metrics"],
    ["callbacks"],
    ["algorithms", "backends", "datasets"],
    ["modules"],
    ["tasks"],
    ["trainer"],
    ["recipe"],
    ["compare"],
    ["cli"],
    ["__main__"],
]

# Imports that are still against the order or in a circle, each with the branch that removes it. A line whose import has
# gone, or is right by now, fails the test: it has to go as well.
EXCEPTIONS = {
    ("rounds.loop", "backends.client_parallel.synchronisation"): "rounds",
    ("rounds.loop", "backends.vectorized.stacked_model"): "rounds",
    ("rounds.loop", "backends.vectorized.visit_groups"): "rounds",
    ("rounds.overridden", "backends.client_parallel.distributed_log"): "rounds",
    ("rounds.overridden", "backends.client_parallel.synchronisation"): "rounds",
    ("rounds.round", "backends.vectorized.stacked_model"): "rounds",
    ("rounds.remote", "rounds.loop"): "rounds",
    ("server.interface", "server.server"): "rounds",
    ("callbacks.federation", "backends.client_parallel.distributed_log"): "rounds",
    ("backends.flower.server", "algorithms.feddane.gradient_correction"): "rounds",
    ("backends.flower.server", "algorithms.fedfusion.callback"): "rounds",
    ("backends.flower.server", "algorithms.fedma.callback"): "rounds",
    ("compare.central", "cli.main"): "methods",
    ("compare.plan", "cli.main"): "methods",
    ("compare.run", "cli.main"): "methods",
    ("cli.flower", "cli.main"): "methods",
    ("metrics.entropy", "algorithms.fedmargin.prototypes"): "wordsalg",
    ("algorithms.fedma.aggregator", "algorithms.fedma.callback"): "wordsalg",
    ("algorithms.fedmargin.aggregator", "algorithms.fedmargin.callback"): "wordsalg",
    ("algorithms.fesem.aggregator", "algorithms.fesem.center_evaluation"): "wordsalg",
}

# `__init__.py` files that do more than re-export, likewise.
DOORS_THAT_DO_MORE = {"algorithms": "methods"}

# The file that reads recipes loads the public rooms (`import lightning_fed.callbacks`), so that classes can be named in
# a recipe without their module.
READS_RECIPES = "cli.main"


def name_of(path):
    """The dotted name of a file, without that of the package; empty for the package's own ``__init__.py``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


DOORS = {name_of(path): path for path in PACKAGE.rglob("__init__.py")}
FILES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


def imports_of(path):
    """Names, dotted as above, of what a file imports of the package: ``import x`` and ``from x import y`` apart.

    Wherever the statement stands: also in functions, and where only a type checker sees it. That
    ``from lightning_fed.data import arrays`` means a file does not make it one: it goes through the door.
    """
    loaded, taken = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            loaded |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports do not say which room they mean"
            if {alias.name for alias in node.names} != {"__version__"}:  # that is defined in the package's door
                taken.add(node.module)
    return [
        {
            name.removeprefix("lightning_fed").removeprefix(".")
            for name in names
            if name.split(".")[0] == "lightning_fed"
        }
        for names in (loaded, taken)
    ]


LOADED, TAKEN = ({name: imports_of(path)[kind] for name, path in FILES.items()} for kind in range(2))
EDGES = {(name, module) for name in FILES for module in LOADED[name] | TAKEN[name] if module}
KEPT = EDGES - EXCEPTIONS.keys()
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def is_against_the_order(name, module):
    room, other_room = name.partition(".")[0], module.partition(".")[0]
    return room != other_room and RANK[other_room] >= RANK[room]


def circle_through(name, module):
    """Whether ``module`` leads back to ``name``, by imports that are no exceptions."""
    reached, ahead = set(), {module}
    while ahead:
        reached |= ahead
        ahead = {after for before, after in KEPT if before in ahead} - reached
    return name in reached


def test_every_room_has_its_place_in_the_order():
    assert {name.partition(".")[0] for name in [*FILES, *DOORS] if name} <= RANK.keys()


def test_imports_are_of_files_that_there_are():
    assert {module for _, module in EDGES} <= FILES.keys() | DOORS.keys()


def test_imports_go_one_way():
    assert {edge for edge in KEPT if is_against_the_order(*edge)} == set()


def test_files_import_each_other_in_no_circle():
    graph = {name: {module for file, module in KEPT if file == name} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(("name", "module"), EXCEPTIONS)
def test_listed_exceptions_are_exceptions(name, module):
    assert (name, module) in EDGES
    assert is_against_the_order(name, module) or circle_through(name, module)


def test_files_import_from_the_files_that_define():
    assert {(name, module) for name in FILES for module in TAKEN[name] & DOORS.keys()} == set()
    assert {name for name in FILES if LOADED[name] & DOORS.keys()} == {READS_RECIPES}


@pytest.mark.parametrize("room", ["messages", "numerics", "model", "server", "client"])
def test_the_halves_import_no_lightning(room):
    """Directly: what a half does can be tried without a Trainer."""
    for name in FILES:
        if name.partition(".")[0] == room:
            statements = list(ast.walk(ast.parse(FILES[name].read_text())))
            modules = [node.module for node in statements if isinstance(node, ast.ImportFrom)]
            modules += [alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names]
            assert "lightning" not in {module.partition(".")[0] for module in modules}, name


def is_of_a_door(statement):
    if isinstance(statement, ast.Assign):
        return {ast.unparse(target) for target in statement.targets} <= {"__all__", "__version__"}
    return isinstance(statement, ast.Import | ast.ImportFrom)


def test_doors_only_reexport():
    bodies = {name: ast.parse(path.read_text()).body for name, path in DOORS.items()}
    assert all(isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) for body in bodies.values())
    do_more = {name for name, body in bodies.items() if not all(map(is_of_a_door, body[1:]))}
    assert do_more == set(DOORS_THAT_DO_MORE)


def test_tests_mirror_the_package():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert [folder for folder in folders if not (PACKAGE / folder).is_dir()] == []


# --- docs/architecture.md ---------------------------------------------------------------------------------------------


def test_the_architecture_page_has_the_order():
    quote = " ".join(re.findall(r"^> (.*)$", ARCHITECTURE.read_text(), re.M))
    rooms = {name.partition(".")[0] for name in [*FILES, *DOORS]} - {"__main__"}
    order = [[room for room in line if room in rooms] for line in ORDER]
    assert [re.findall(r"`(\w+)`", line) for line in quote.split("<")] == [line for line in order if line]


def test_the_architecture_page_has_every_room_in_its_tree():
    tree = re.search(r"^lightning_fed/\n((?: +.*\n)+)", ARCHITECTURE.read_text(), re.M)[1]
    rooms = {name.partition(".")[0] for name in [*FILES, *DOORS] if name} - {"__main__"}
    expected = {f"{room}/" if room in DOORS else f"{room}.py" for room in rooms}
    assert sorted(re.findall(r"^ +(\S+)", tree, re.M)) == sorted(expected)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+/[\w/]+\.py)`", ARCHITECTURE.read_text()))))
def test_the_architecture_page_names_files_that_there_are(path):
    assert (PACKAGE / path).exists() or (PACKAGE.parent / path).exists()
