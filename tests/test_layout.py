"""The layout: imports go one way without cycles, from defining files; ``__init__.py`` files only re-export."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import warm_process

PACKAGE = Path(__file__).parents[1] / "lightning_fed"
ARCHITECTURE = PACKAGE.parent / "docs" / "dev" / "architecture.md"

# A file imports from packages in earlier lines and from its own package. Packages in one line are independent.
ORDER = [
    ["errors", "argument_checks", "atomic_files", "messages", "lazy_names"],
    ["console"],
    ["numerics"],
    ["process_group"],
    ["model"],
    ["lightning"],
    ["federated_callback"],
    ["rule"],
    ["steps"],
    ["server", "client"],
    ["method"],
    ["data"],
    ["fit"],
    ["rounds"],
    ["features", "checks"],
    ["batch_norm"],
    ["matching", "metrics"],
    ["callbacks"],
    ["bounds"],
    ["report"],
    ["compression", "algorithms", "attacks", "datasets"],
    ["partitions"],
    ["privacy"],
    ["backends"],
    ["modules"],
    ["tasks"],
    ["trainer"],
    ["recipe"],
    ["study"],
    ["compare"],
    ["cli"],
    ["__main__"],
]

# Maintainers must know these folders and files. Everything else can be deleted folder by folder.
KERNEL = {
    "messages", "rule", "steps", "federated_callback", "method", "server", "client", "lightning", "fit", "rounds",
    "data", "model", "numerics", "process_group", "errors", "argument_checks", "atomic_files", "console",
    "lazy_names", "trainer", "callbacks.federation", "callbacks.progress_bar",
}  # fmt: skip

# The recipe reader loads the public packages (`import lightning_fed.callbacks`), so that recipes can name classes
# without modules.
READS_RECIPES = "recipe"


def name_of(path):
    """Dotted file name without the package; empty for the top ``__init__.py``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


DOORS = {name_of(path): path for path in PACKAGE.rglob("__init__.py")}
DOORS |= {name_of(path.with_suffix(".py")): path for path in PACKAGE.rglob("__init__.pyi")}  # with lazy names
FILES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def imports_of(path):
    """Dotted names of the package's modules imported by a file, separately for ``import x`` and ``from x import y``.

    Includes imports in functions and for type checkers. In ``from lightning_fed.data import arrays`` the module counts
    as imported through the package.
    """
    loaded, taken = set(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            loaded |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports do not say which room they mean"
            if {alias.name for alias in node.names} != {"__version__"}:  # defined in the top package
                taken.add(node.module)
    return [
        {
            name.removeprefix("lightning_fed").removeprefix(".")
            for name in names
            if name.split(".")[0] == "lightning_fed"
        }
        for names in (loaded, taken)
    ]


@cache
def imports():
    return {name: imports_of(path) for name, path in FILES.items()}


@cache
def edges():
    """Pairs of a file and an imported module, both dotted."""
    return {(name, module) for name, both in imports().items() for modules in both for module in modules if module}


RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def is_against_the_order(name, module):
    room, other_room = name.partition(".")[0], module.partition(".")[0]
    return room != other_room and RANK[other_room] >= RANK[room]


def loaded_with(path):
    """Names of the package's modules loaded with a file, including modules for types.

    Callbacks created by a rule on request load no file.
    """
    body = tree_of(path).body
    statements = [*body, *(part for statement in body if isinstance(statement, ast.If) for part in statement.body)]
    return {
        node.module.removeprefix("lightning_fed.")
        for node in statements
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning_fed.")
    }


def test_every_room_has_its_place_in_the_order():
    assert {name.partition(".")[0] for name in [*FILES, *DOORS] if name} <= RANK.keys()


def test_imports_are_of_files_that_there_are():
    assert {module for _, module in edges()} <= FILES.keys() | DOORS.keys()


def test_imports_go_one_way():
    assert {edge for edge in edges() if is_against_the_order(*edge)} == set()


def test_files_know_each_other_in_no_circle():
    graph = {name: loaded_with(path) for name, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


WRITERS_OF_A_FIT = {
    "trainer": {"callbacks.federation"},
    "policies": {"callbacks.federation"},
    "synchronisation": {"rounds.loop"},
    "cohort": {"rounds.loop"},
    "rounds": {"rounds.loop"},
    "number": {"rounds.loop"},
    "is_plain": {"rounds.loop"},
    "averages": {"rounds.loop"},
    "norm_layers": {"rounds.round"},
    "model_round": {"rounds.round"},
    "fastest": {"backends.vectorized.plan"},
    "reports": {"batch_norm.measurement"},
    "treatment": {"fit.federated_fit"},
    "is_alone": {"fit.federated_fit"},
    "num_measured": {"batch_norm.measurement"},
    "served_client": {"batch_norm.measurement"},
    "decision": {"batch_norm.measurement", "backends.wire.server_for_client"},
}
"""The files that assign to attributes of a ``FederatedFit`` and ``BatchNormState``. Options and parts are constant."""


def writers_of_a_fit():
    """Files by attribute, without ``fit.federated_fit``."""
    writers = {}
    for name, path in FILES.items():
        targets = [
            target
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
            for assigned in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for target in (assigned.elts if isinstance(assigned, ast.Tuple) else [assigned])
        ]
        for target in targets:
            owner = ast.unparse(target.value).rpartition(".")[2] if isinstance(target, ast.Attribute) else ""
            if owner in ("fit", "_fit", "batch_norm"):
                writers.setdefault(target.attr, set()).add(name)
    return writers


def test_an_attribute_of_a_fit_has_one_writer():
    assert writers_of_a_fit() == WRITERS_OF_A_FIT


def test_files_import_from_the_files_that_define():
    assert {(name, module) for name, (_, taken) in imports().items() for module in taken & DOORS.keys()} == set()
    assert {name for name, (loaded, _) in imports().items() if loaded & DOORS.keys()} == {READS_RECIPES}


@pytest.mark.parametrize("room", ["messages", "numerics", "model", "rule", "steps", "server", "client"])
def test_the_halves_import_no_lightning(room):
    """Without direct imports both sides can be tested without a Trainer."""
    for name in FILES:
        if name.partition(".")[0] == room:
            statements = list(ast.walk(tree_of(FILES[name])))
            modules = [node.module for node in statements if isinstance(node, ast.ImportFrom)]
            modules += [alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names]
            assert "lightning" not in {module.partition(".")[0] for module in modules}, name


# --- Kernel line ------------------------------------------------------------------------------------------------------


def is_in_kernel(name):
    return name.partition(".")[0] in KERNEL or name in KERNEL


def test_the_kernel_imports_nothing_from_below_the_line():
    assert {edge for edge in edges() if is_in_kernel(edge[0]) and not is_in_kernel(edge[1])} == set()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_the_kernel_fits_without_each_feature_below_the_line(tmp_path):
    """Through both entry points, with a custom rule.

    A name from the deleted feature gives an error with the feature's name.
    """
    rooms = {name.partition(".")[0] for name in [*FILES, *DOORS] if name}
    features = [*sorted(rooms - KERNEL - {"__main__"}), "callbacks/evaluation"]
    assert len(features) == 22  # 21 packages, and the callbacks in `callbacks`
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).parent / "deletion_script.py"),
        str(tmp_path),
        *features,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors == dict.fromkeys(features, "")


def test_below_the_line_only_exported_names_of_the_kernel_are_imported():
    """From a folder the names in ``__all__``; from a single file all names without an underscore."""
    exported = {
        name: {alias.name for node in tree_of(path).body if isinstance(node, ast.ImportFrom)
               for alias in node.names}
        for name, path in DOORS.items()
    }  # fmt: skip
    hidden = set()
    for name, path in FILES.items():
        if is_in_kernel(name):
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("lightning_fed."):
                continue
            module = node.module.removeprefix("lightning_fed.")
            room = module.partition(".")[0]
            if room in KERNEL and room != name.partition(".")[0]:
                known = exported.get(room)
                hidden |= {
                    (name, module, alias.name)
                    for alias in node.names
                    if alias.name.startswith("_") or (known is not None and alias.name not in known)
                }
    assert hidden == set()


def is_of_a_door(statement):
    if isinstance(statement, ast.Assign):
        return {ast.unparse(target) for target in statement.targets} <= {"__all__", "__version__"}
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.AnnAssign)


def test_doors_only_reexport():
    bodies = {name: tree_of(path).body for name, path in DOORS.items()}
    assert all(isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) for body in bodies.values())
    assert {name for name, body in bodies.items() if not all(map(is_of_a_door, body[1:]))} == set()


def test_no_lazy_name_is_a_submodule():
    """The import of the submodule would replace the name."""
    for folder in (PACKAGE / name for name in ("callbacks", "data", "steps")):
        names = {alias.asname for node in ast.parse((folder / "__init__.pyi").read_text()).body
                 if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
        assert names & {path.stem for path in folder.iterdir()} == set()


def test_tests_mirror_the_package():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    folders.remove(Path("projects"))  # user projects
    assert [folder for folder in folders if not (PACKAGE / folder).is_dir()] == []


# --- Budgets ----------------------------------------------------------------------------------------------------------

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SCOPES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SOURCES = sorted(PACKAGE.rglob("*.py"))
FEATURES = {
    "study": {"study", "cli.study", "backends.wire.question_sum", "privacy.masked_sums"},
    "rehearsal": {"backends.rehearsal", "cli.rehearse"},
    "kept rounds": {"backends.kept_rounds", "cli.replay", "cli.certify"},
    "asynchronous rounds": {"algorithms.asynchronous", "backends.wire.arrivals"},
    "report": {"report", "cli.report"},
    "several processes per client": {"backends.ddp"},
    "averages of weights": {"callbacks.weight_averages"},
}
"""Modules and folders with a separate limit for tokens."""


@cache
def docstrings_of(path):
    return {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }


@cache
def imports_in(path):
    return {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, node.end_lineno + 1)
    }


@cache
def tokens_of(path):
    """First and last line of each token, without comments, line ends, indents and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [
        (token.start[0], token.end[0])
        for token in tokens
        if token.type not in LAYOUT and token.start[0] not in docstrings_of(path)
    ]


def count_tokens(paths):
    """Tokens without imports and docstrings. Denser lines do not lower the number."""
    return sum(start not in imports_in(path) for path in paths for start, _ in tokens_of(path))


def feature_of(path):
    name = name_of(path)
    owners = (
        feature for feature, parts in FEATURES.items() if any(f"{name}.".startswith(f"{part}.") for part in parts)
    )
    return next(owners, None)


def count_code_lines(paths):
    """Lines with a token. Imports count. Docstrings, comments and blank lines do not count."""
    return sum(len({line for start, end in tokens_of(path) for line in range(start, end + 1)}) for path in paths)


def count_lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_members(file, name):
    body = next(node for node in tree_of(FILES[file]).body if isinstance(node, ast.ClassDef) and node.name == name).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    return sum(not name.startswith("_") for name in names)


def count_arguments(file, name):
    owner = next(node for node in tree_of(FILES[file]).body if isinstance(node, ast.ClassDef) and node.name == name)
    arguments = next(node for node in owner.body if getattr(node, "name", "") == "__init__").args
    return len(arguments.args) + len(arguments.kwonlyargs) - 1


def is_read_for_a_visit(file):
    """Whether a reader needs the file for a change to a visit."""
    return file.partition("/")[0] in {"rounds", "client", "fit"} or file == "data/round_loader.py"


@pytest.fixture(scope="module")
def measured():
    """Counts for each row in the table.

    Classes and files in a fit: everything with a method or function that runs in a one-round FedAvg fit with two
    clients and without validation. An inherited method counts for the object's class.

    Lines for a visit: all lines of the files in `rounds/`, `client/` and `fit/`, and of `data/round_loader.py`, with a
    function that runs or waits between the request and the answer.

    Kernel lines: lines of code in all folders above the line and in both entry points.

    Tokens and lines of docstrings: the package without `FEATURES`; tokens also for each feature.
    """
    fit = json.loads(warm_process.run("tests.census_script")[0])
    kernel = [path for path in SOURCES if is_in_kernel(name_of(path))]
    features = {feature: [path for path in SOURCES if feature_of(path) == feature] for feature in FEATURES}
    return {
        "classes that run in a fit": len(fit["classes"]),
        "files that run in a fit": len(fit["files"]),
        "lines to read for a visit": count_lines(PACKAGE / file for file in fit["visit"] if is_read_for_a_visit(file)),
        "kernel, lines of code": count_code_lines(kernel),
        "package, tokens": count_tokens(path for path in SOURCES if feature_of(path) is None),
        **{f"{name}, tokens": count_tokens(paths) for name, paths in features.items()},
        "package, lines of docstrings": sum(len(docstrings_of(path)) for path in SOURCES if feature_of(path) is None),
        "members of a rule": count_members("rule", "Aggregator"),
        "members of a step": count_members("steps.update_step", "UpdateStep"),
        "members of a callback": count_members("federated_callback", "FederatedCallback"),
        "arguments of `Federation`": count_arguments("callbacks.federation", "Federation"),
    }


def limits():
    rows = re.findall(r"^\| ([^|]+) \| [\d,]* \| ([\d,]+) \| ([\d,]+) \|$", ARCHITECTURE.read_text(), re.M)
    return {name: (int(limit.replace(",", "")), int(budget.replace(",", ""))) for name, limit, budget in rows}


def test_no_number_of_the_package_is_above_its_limit(measured):
    """`-s` prints the table. After a decrease by one part in twenty the limit must follow."""
    table = limits()
    assert table.keys() == measured.keys()
    for name, (limit, budget) in table.items():
        print(f"{name:30s} {measured[name]:9,d} limit {limit:9,d} budget {budget:9,d}")  # noqa: T201
    too_large = {name: (measured[name], limit) for name, (limit, _) in table.items() if measured[name] > limit}
    assert not too_large, f"Expected numbers within the limits of {ARCHITECTURE.name}, but got {too_large}."
    too_lax = {name: (measured[name], limit) for name, (limit, _) in table.items() if limit > measured[name] * 1.05}
    assert not too_lax, f"Expected limits near the numbers: lower them in {ARCHITECTURE.name}: {too_lax}."


# --- docs/dev/architecture.md -----------------------------------------------------------------------------------------


def test_the_architecture_page_has_the_order():
    quote = " ".join(re.findall(r"^> (.*)$", ARCHITECTURE.read_text(), re.M))
    rooms = {name.partition(".")[0] for name in [*FILES, *DOORS]} - {"__main__"}
    order = [[room for room in line if room in rooms] for line in ORDER]
    assert [re.findall(r"`(\w+)`", line) for line in quote.split("<")] == [line for line in order if line]


def test_the_architecture_page_has_every_room_in_its_tree():
    tree = re.search(r"^lightning_fed/\n((?: +.*\n|-.*\n)+)", ARCHITECTURE.read_text(), re.M)[1]
    rooms = {name.partition(".")[0] for name in [*FILES, *DOORS] if name} - {"__main__"}
    expected = {f"{room}/" if room in DOORS else f"{room}.py" for room in rooms}
    assert sorted(re.findall(r"^ +(\S+)", tree, re.M)) == sorted(expected)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+/[\w/]+\.py)`", ARCHITECTURE.read_text()))))
def test_the_architecture_page_names_files_that_there_are(path):
    assert (PACKAGE / path).exists() or (PACKAGE.parent / path).exists()
