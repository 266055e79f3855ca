"""Pages are correct: links, logged names, recipes, diffs, errors; code blocks run. Tests for `make docs`."""

import ast
import difflib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import METHODS
from lightning_fed.callbacks import CommunicationReport
from lightning_fed.cli.main import main
from lightning_fed.fit.round_log import RoundLog
from tests.test_docs import DOCS, PAGES, README, ROOT, blocks, logged_names, page_id

pytestmark = pytest.mark.prose


def test_no_page_names_a_value_that_is_not_logged():
    # The last names are logged by robust rules, bounds and asynchronous rules.
    known = logged_names(inspect.getdoc(CommunicationReport))
    known |= logged_names(inspect.getdoc(RoundLog)) | {"fed/excluded", "fed/shortened"}
    known |= {"fed/virtual_seconds", "fed/version"}
    known |= {name.replace("_bytes", "_MB") for name in known}  # in TensorBoard
    assert {page: named for page in PAGES if (named := logged_names(page.read_text()) - known)} == {}


# --- Code blocks ------------------------------------------------------------------------------------------------------


def test_python_blocks_compile():
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, page_id(page), "exec")


TINY = {  # long-running values in pages, and their short replacements
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
    """In page order, in one namespace, offline and in an empty folder."""
    if page.stem == "nvflare":
        pytest.importorskip("nvflare", reason="nvflare is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_fed.method.METHODS", dict(METHODS))  # a page may register a method
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


def test_the_readme_is_short_and_its_commands_exist(capsys):
    text = README.read_text()
    assert len(text.split()) <= 650
    commands = re.findall(r"^    lightning-fed (\w+)", text, re.M)
    assert commands == ["demo"]
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install \"\S*\[(\w+)\]\"", text)) <= extras.keys()


def test_the_commands_of_the_readme_are_make_targets():
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES for target in re.findall(r"(?:^\s*|`)make ([\w-]+)", page.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


def test_recipes_that_are_named_exist():
    for page in PAGES:
        for name in re.findall(r"\brecipes/(\w+\.yaml)", page.read_text()):
            assert (ROOT / "recipes" / name).exists(), (page_id(page), name)


def messages():
    """The package's strings; parts of an f-string are joined by dots."""
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
    known += "Expected more than 1 value per channel when training"  # of torch
    known += "Found more than one stateful callback of type"  # of Lightning
    assert [text for text in texts if text not in known] == []


# --- Links ------------------------------------------------------------------------------------------------------------


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), (page_id(page), target)


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_headings_that_are_linked_exist():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
            if "://" in target:
                continue
            text = ((page.parent / target) if target else page).read_text()
            assert anchor in anchors(text), (page_id(page), anchor)


@pytest.mark.parametrize("words", ["early stopping", "TLS certificate", "per client", "own rule", "batch size"])
def test_the_search_finds_frequent_questions_in_headings(words):
    """The site's search ranks headings above text."""
    headings = [
        line for page in (DOCS / "guides").glob("*.md") for line in page.read_text().splitlines() if line[:2] == "##"
    ]
    assert any(words.lower() in heading.lower() for heading in headings)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"(?<= )[\w/]+\.md$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(listed) == {page for page in pages if not page.startswith("dev/")}  # for contributors


def test_links_to_files_on_github_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"lightning-fed/blob/main/([^)#\s>]+)", page.read_text()):
            assert (ROOT / target).exists(), (page_id(page), target)


# --- Site -------------------------------------------------------------------------------------------------------------


def test_the_site_builds(tmp_path):
    """Dead links, dead anchors and missing references are errors."""
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
