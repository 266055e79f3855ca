"""The documentation says what the code does: exports, logged names, code blocks, diffs, links."""

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import CommunicationReport
from lightning_fed.method import METHODS
from lightning_fed.rounds.round_log import RoundLog
from tests import models

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
ROOMS = {  # every package with exports, and the page of the API that has them
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
    "lightning_fed.backends.vectorized": "backends.md",
    **({"lightning_fed.backends.flower": "backends.md"} if find_spec("flwr") else {}),  # an extra
    **({"lightning_fed.backends.nvflare": "backends.md"} if find_spec("nvflare") else {}),  # an extra
    **({"lightning_fed.backends.wire": "backends.md"} if find_spec("Crypto") else {}),  # comes with those
    "lightning_fed.callbacks": "callbacks.md",
    "lightning_fed.compare": "compare.md",
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
    """The fenced blocks of a page, each on the line it has there, so that errors name it."""
    text = page.read_text()
    fences = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * (text[: fence.start()].count("\n") + 1) + fence[1] for fence in fences]


# --- the API reference ------------------------------------------------------------------------------------------------


def documented():
    """Path to object, of everything that the API pages describe."""
    pages = sorted((DOCS / "api").glob("*.md"))
    paths = [path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert len(paths) == len(set(paths))
    objects = {}
    if not find_spec("flwr"):  # an extra
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.flower.")]
    if not find_spec("nvflare"):  # an extra
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.nvflare.")]
    if not find_spec("Crypto"):  # comes with both
        paths = [path for path in paths if not path.startswith("lightning_fed.backends.wire.")]
    for path in paths:
        module, name = path.rsplit(".", 1)
        objects[path] = getattr(importlib.import_module(module), name)
    return objects


def test_every_room_has_a_page():
    packages = [path.parent for path in (ROOT / "lightning_fed").rglob("__init__.py")]
    packages = [package for package in packages if package.name != "flower" or find_spec("flwr")]  # an extra
    packages = [package for package in packages if package.name != "nvflare" or find_spec("nvflare")]  # likewise
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
    for name in module.__all__:
        value = getattr(module, name)
        assert any(value is known for known in objects), f"{room}.{name} is not in docs/api"
        assert re.search(rf"\b{name}\b", page), f"{room}.{name} is not on its room's page"


def test_nothing_is_documented_twice():
    """Under two names, of two packages that export it."""
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
    """Line number and first line of every docstring of a file, also of those of constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip().partition("\n")[0]


def test_first_lines_say_what_a_thing_is_or_does():
    """A noun phrase or a verb: not a clause that a reader has to complete."""
    clause = re.compile(r"(what|whether|whose|where|how|nothing|who|that|which)\b", re.IGNORECASE)
    files = [*(ROOT / "lightning_fed").rglob("*.py")]
    lines = [(path.name, number, line) for path in files for number, line in first_lines(path)]
    assert len(lines) > 1000
    assert [line for line in lines if clause.match(line[2])] == []


@pytest.mark.parametrize("path", documented())
def test_docstrings_name_every_argument(path):
    value = documented()[path]
    if not callable(value):
        return
    text = inspect.getdoc(value) or ""
    assert text, path
    described = re.search(r"^Args:\n((?: +.*\n|\n)*)", text + "\n", re.M)
    if described:
        names = re.findall(r"^ {4}\*{0,2}(\w+):", described[1], re.M)
        parameters = list(inspect.signature(value).parameters)
        if value is FederatedTrainer:  # it forwards the others, which their classes describe
            parameters = list(value.__init__.__code__.co_varnames[1:5])
        assert sorted(names) == sorted(parameters), path


# --- logged names -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_page_names_a_value_that_is_not_logged(page):
    # The last are what robust rules and bounds log.
    known = logged_names(inspect.getdoc(CommunicationReport))
    known |= logged_names(inspect.getdoc(RoundLog)) | {"fed/excluded", "fed/shortened"}
    assert logged_names(page.read_text()) <= known


# --- code blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, page_id(page), "exec")


TINY = {  # what takes long in the pages, and what the tests make of it
    "max_rounds=6": "max_rounds=1",
    "max_rounds=10": "max_rounds=2",
    "max_epochs=10": "max_epochs=2",
    "num_train=480": "num_train=60, image_size=32",
    "num_val=96": "num_val=8",
    "num_val=64": "num_val=8",
    "num_clients=12": "num_clients=3",
    "clients_per_round=4": "clients_per_round=2",
}
RUNNING = [README, *(page for page in PAGES if page.parent in (DOCS, DOCS / "guides") and page.name != "index.md")]


@pytest.mark.parametrize("page", [page for page in RUNNING if blocks(page, "python")], ids=page_id)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In the order of the page, in one namespace, offline and in an empty folder."""
    if page.stem == "nvflare":
        pytest.importorskip("nvflare", reason="nvflare is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_fed.method.METHODS", dict(METHODS))  # a page may register its own
    namespace = {"__name__": "docs"}
    for block in blocks(page, "python"):
        if page in (README, DOCS / "quickstart.md", DOCS / "guides" / "segmentation.md"):
            for long, short in TINY.items():
                block = re.sub(rf"\b{long}\b", short, block)
        exec(compile(block, page_id(page), "exec"), namespace)
    trainers = [value for value in namespace.values() if isinstance(value, FederatedTrainer)]
    fitted = [trainer for trainer in trainers if trainer.state.finished and trainer.state.fn == "fit"]
    assert all(trainer.federation.rounds == trainer.max_epochs for trainer in fitted)


def test_the_home_page_has_the_readmes_ten_lines():
    (home,), (readme,) = (blocks(page, "python") for page in (DOCS / "index.md", README))
    assert home.strip() == readme.strip()
    assert len(readme.strip().splitlines()) <= 10


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=page_id)
def test_diffs_are_those_of_the_examples(page):
    shown = [block.strip() for block in blocks(page, "diff")]
    real = []
    for name in ("segmentation", "classifier"):
        files = [f"examples/{name}{kind}.py" for kind in ("", "_federated")]
        lines = [(ROOT / file).read_text().splitlines() for file in files]
        changes = difflib.unified_diff(*lines, *files, lineterm="", n=0)
        real.append("\n".join(line for line in changes if not line.startswith(("---", "+++", "@@"))))
    assert shown == real


def test_the_commands_of_the_readme_are_make_targets():
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES for target in re.findall(r"(?:^\s*|`)make (\w+)", page.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_recipes_that_are_named_exist(page):
    for name in re.findall(r"\brecipes/(\w+\.yaml)", page.read_text()):
        assert (ROOT / "recipes" / name).exists(), name


def messages():
    """The package's strings; the parts of an f-string are joined by dots."""
    for path in (ROOT / "lightning_fed").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_all_methods_are_in_the_table_of_what_works_with_what():
    text = (DOCS / "guides" / "works_with.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text.partition("<!-- /works with -->")[0], re.M) == list(METHODS)


def test_errors_that_are_explained_are_raised():
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| (?:``(.+?) ?``|`(.+?)`) \|", page, re.M)
    texts = [first or second for first, second in quoted]
    known = "\n".join(re.sub(r"%[rsd]", "...", message) for message in messages())
    assert len(texts) > 20
    of_torch = "Expected more than 1 value per channel when training"
    assert [text for text in texts if text not in known and text != of_torch] == []


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_headings_that_are_linked_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        text = ((page.parent / target) if target else page).read_text()
        assert anchor in anchors(text)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"(?<= )[\w/]+\.md$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(listed) == {page for page in pages if not page.startswith("dev/")}  # for who changes the package


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_files_on_github_lead_somewhere(page):
    for target in re.findall(r"lightning-fed/blob/main/([^)#\s>]+)", page.read_text()):
        assert (ROOT / target).exists(), target


# --- the site ---------------------------------------------------------------------------------------------------------


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


def test_the_site_builds(tmp_path):
    """With dead links, dead anchors and references to nothing as errors."""
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings")
    for name in ("docs", "lightning_fed"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    html = (site / "api" / "callbacks" / "index.html").read_text()
    assert "clients_per_round" in html
    for left in (":class:", ":math:", ".. math::", "&gt;&gt;&gt; <p>"):
        assert left not in html
    assert 'id="lightning_fed.callbacks.FederatedCallback.on_client_start"' in html
    assert not re.search(r'<h\d id="[\w.]+\.(on_train_batch_end|on_fit_start|state_dict|setup)"', html)
    index = json.loads((site / "search.json").read_text())["items"]
    for word in ("BatchNorm", "LoRA", "differential privacy", "resume"):
        assert any(word.lower() in entry["title"].lower() for entry in index), word
