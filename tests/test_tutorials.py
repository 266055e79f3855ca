"""The tutorials run unchanged: printed and drawn results are on the page, and the notebooks equal the pages."""

import ast
import importlib.util
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("tutorials", ROOT / "docs" / "_ext" / "tutorials.py")
tutorials = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorials)

PAGES = {page.stem: page for page in tutorials.PAGES}
NEEDS = {"lora": "peft", "privacy": "dp_accounting", "volumes": "monai"}

pytestmark = [
    pytest.mark.prose,
    # Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    # peft 0.21 uses a deprecated name in transformers 5.23.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # MONAI 1.6 calls a function with an argument deprecated in MONAI 1.5.
    pytest.mark.filterwarnings("ignore:monai.metrics.utils get_mask_edges:FutureWarning"),
]


def words(text):
    """Output equal on all machines: without numbers and surrounding signs."""
    return re.sub(r"\([^)]*\)|[\d.]+|nan|[-±]", " ", text).split()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_prints_and_draws_what_it_shows(name, tmp_path, monkeypatch):
    if not find_spec(NEEDS.get(name, "matplotlib")):
        pytest.skip(f"{NEEDS.get(name, 'matplotlib')} is not installed")
    text = PAGES[name].read_text()
    printed = tutorials.run(PAGES[name], tmp_path)
    assert [words(out) for out in printed] == [words(out) for _, out in tutorials.code_blocks(text)]
    for picture in tutorials.pictures(text):
        assert (tmp_path / f"{picture}.png").stat().st_size > 1000, picture
        assert (ROOT / "docs" / "assets" / "tutorials" / f"{name}-{picture}.png").is_file()


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_is_its_page(name):
    page = PAGES[name]
    book = page.with_suffix(".ipynb").read_text()
    assert book == tutorials.as_notebook(page.read_text())
    cells = json.loads(book)["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == [block for block, _ in tutorials.code_blocks(page.read_text())]
    for block in code:
        ast.parse(block)


def test_every_picture_belongs_to_a_page():
    shown = {f"{page.stem}-{name}.png" for page in PAGES.values() for name in tutorials.pictures(page.read_text())}
    assert {path.name for path in (ROOT / "docs" / "assets" / "tutorials").glob("*")} == shown
