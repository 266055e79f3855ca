"""The API reference equals the code: exports, arguments, logged names."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import Dirichlet
from lightning_fed.fit.round_log import RoundLog
from tests import models

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
ROOMS = {  # all packages with exports, and their API pages
    "lightning_fed": "lightning_fed.md",
    "lightning_fed.algorithms": "algorithms.md",
    "lightning_fed.algorithms.fedaws": "algorithms.md",
    "lightning_fed.algorithms.feddane": "algorithms.md",
    "lightning_fed.algorithms.fedfusion": "fedfusion.md",
    "lightning_fed.algorithms.fedma": "fedma.md",
    "lightning_fed.algorithms.fedmargin": "fedmargin.md",
    "lightning_fed.algorithms.fedss": "fedss.md",
    "lightning_fed.algorithms.fesem": "algorithms.md",
    "lightning_fed.algorithms.robust": "robust.md",
    "lightning_fed.attacks": "attacks.md",
    "lightning_fed.privacy": "privacy.md",
    "lightning_fed.backends.client_parallel": "backends.md",
    "lightning_fed.backends.kept_rounds": "backends.md",
    "lightning_fed.backends.vectorized": "backends.md",
    **({"lightning_fed.backends.flower": "backends.md"} if find_spec("flwr") else {}),  # an extra
    **({"lightning_fed.backends.nvflare": "backends.md"} if find_spec("nvflare") else {}),  # an extra
    **({"lightning_fed.backends.wire": "backends.md"} if find_spec("Crypto") else {}),  # required by both extras
    "lightning_fed.callbacks": "callbacks.md",
    "lightning_fed.compare": "compare.md",
    "lightning_fed.study": "study.md",
    "lightning_fed.data": "data.md",
    "lightning_fed.datasets": "datasets.md",
    "lightning_fed.matching": "matching.md",
    "lightning_fed.metrics": "metrics.md",
    "lightning_fed.metrics.functional": "metrics.md",
    "lightning_fed.modules": "modules.md",
    "lightning_fed.steps": "steps.md",
    "lightning_fed.tasks": "tasks.md",
}


def page_id(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """The fenced blocks of a page, padded to the original line numbers for errors."""
    text = page.read_text()
    fences = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * (text[: fence.start()].count("\n") + 1) + fence[1] for fence in fences]


# --- API reference ----------------------------------------------------------------------------------------------------


def documented():
    pages = sorted((DOCS / "api").glob("*.md"))
    paths = [path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert len(paths) == len(set(paths))
    paths = [path for path in paths if path.rpartition(".")[0] not in paths]  # without members of classes
    objects = {}
    if not find_spec("flwr"):  # an extra
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.flower.")]
    if not find_spec("nvflare"):  # an extra
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.nvflare.")]
    if not find_spec("Crypto"):  # required by both
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.wire.")]
    for path in paths:
        module, name = path.rsplit(".", 1)
        objects[path] = getattr(importlib.import_module(module), name)
    return objects


def test_every_room_has_a_page():
    packages = [path.parent for path in (ROOT / "lightning_fed").rglob("__init__.py")]
    packages = [package for package in packages if package.name != "flower" or find_spec("flwr")]  # an extra
    packages = [package for package in packages if package.name != "nvflare" or find_spec("nvflare")]  # an extra
    with_exports = {
        ".".join(package.relative_to(ROOT).parts)
        for package in packages
        if getattr(importlib.import_module(".".join(package.relative_to(ROOT).parts)), "__all__", ())
    }
    assert with_exports == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_export_is_importable_and_documented(room):
    module = importlib.import_module(room)
    page = (DOCS / "api" / ROOMS[room]).read_text()
    objects = list(documented().values())
    for name, value in ((name, getattr(module, name)) for name in module.__all__):
        if inspect.ismodule(value):
            continue
        assert any(value is known for known in objects), f"{room}.{name} is not in docs/api"
        assert re.search(rf"\b{name}\b", page), f"{room}.{name} is not on its room's page"


def test_nothing_is_documented_twice():
    paths = {}
    for path, value in documented().items():
        paths.setdefault(id(value), []).append(path)
    assert [names for names in paths.values() if len(names) > 1] == []


def test_nothing_else_is_documented_as_an_export():
    for path in documented():
        room, name = path.rsplit(".", 1)
        if room in ROOMS:
            assert name in importlib.import_module(room).__all__, path


def first_lines(path):
    """Line number and first line for every docstring in a file, including docstrings of constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip().partition("\n")[0]


def test_first_lines_say_what_a_thing_is_or_does():
    """A noun phrase or a verb, not a clause without a main sentence."""
    clause = re.compile(r"(what|whether|whose|where|how|nothing|who|that|which)\b", re.IGNORECASE)
    files = [*(ROOT / "lightning_fed").rglob("*.py")]
    lines = [(path.name, number, line) for path in files for number, line in first_lines(path)]
    assert len(lines) > 1000
    assert [line for line in lines if clause.match(line[2])] == []


def test_docstrings_name_every_argument():
    for path, value in documented().items():
        if not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        assert text, path
        described = re.search(r"^Args:\n((?: +.*\n|\n)*)", text + "\n", re.M)
        if described:
            names = re.findall(r"^ {4}\*{0,2}(\w+):", described[1], re.M)
            parameters = list(inspect.signature(value).parameters)
            if value is FederatedTrainer:  # the classes document other arguments
                parameters = list(value.__init__.__code__.co_varnames[1:5])
            assert sorted(names) == sorted(parameters), path


# --- Logged names -----------------------------------------------------------------------------------------------------


def logged_names(text):
    return set(re.findall(r"`((?:fed|comm)/\w+)`", text))


def test_logged_names_are_the_codes(federated_trainer):
    guide = (DOCS / "guides" / "logging.md").read_text()
    table = re.search(r"^\| name \| unit \|.*?\n\n", guide, re.DOTALL | re.M)[0]
    names = set(re.findall(r"^\| `(\S+)` \|", table, re.M))
    assert names == logged_names(inspect.getdoc(RoundLog))

    data = models.as_datasets(models.vectors({"a": 8, "b": 9}))
    trainer = federated_trainer(max_rounds=1)
    trainer.fit(models.Module(models.norm_mlp()), data, data)
    assert names == {name for name in trainer.callback_metrics if re.fullmatch(r"(fed|comm)/\w+", name)}


# --- Site -------------------------------------------------------------------------------------------------------------


def test_the_slider_shows_splits_by_the_package():
    splits = json.loads((DOCS / "assets" / "dirichlet.json").read_text())
    labels = torch.arange(1000) % 5
    for split in splits:
        parts = Dirichlet(10, alpha=split["alpha"]).split(TensorDataset(labels, labels), seed=0)
        counts = [[int((labels[part] == label).sum()) for label in range(5)] for part in parts.values()]
        assert split["counts"] == counts
    assert len({split["alpha"] for split in splits}) == len(splits) > 5


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "_ext" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = """Mean of :math:`w`, see :class:`~lightning_fed.algorithms.FedAvg` and :meth:`mean`.

    .. math:: a = b,
        c = d

    Text.

    Example:
        >>> 1 + 1
        2
    """
    expected = """Mean of \\(w\\), see FEDAVG and <autoref optional identifier="mean"><code>mean</code></autoref>.

    \\[a = b, c = d\\]

    Text.

    Examples:
        >>> 1 + 1
        2
    """
    fedavg = '<autoref optional identifier="lightning_fed.algorithms.FedAvg"><code>FedAvg</code></autoref>'
    assert module.as_markdown(text) == expected.replace("FEDAVG", fedavg)
