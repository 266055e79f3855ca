"""The tutorials run unchanged: printed and drawn results are on the page, and the notebooks equal the pages."""

import ast
import importlib.util
import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from lightning_fed.cli.main import main

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("tutorials", ROOT / "docs" / "_ext" / "tutorials.py")
tutorials = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorials)

PAGES = {page.stem: page for page in tutorials.PAGES}
OPTIONS = ["--trainer.max_rounds", "1", "--trainer.accelerator", "cpu"]
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


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_the_hospitals_plan_and_train_with_the_planned_noise(tmp_path, monkeypatch, capsys):
    """Fewer volumes and a tiny network instead of MONAI's, one round. A slow test runs all commands on the page."""
    pytest.importorskip("opacus")
    pytest.importorskip("dp_accounting")
    text = (ROOT / "docs" / "tutorials" / "mri.md").read_text()
    files = dict(re.findall(r'^```\w+ title="(\w+\.\w+)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    for name in ("monai", "monai.networks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    nets = ModuleType("monai.networks.nets")
    nets.DenseNet = lambda **_: nn.Sequential(nn.AvgPool3d(4), nn.Flatten(), nn.Linear(64, 3))
    monkeypatch.setitem(sys.modules, nets.__name__, nets)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.delitem(sys.modules, "project", raising=False)
    runpy.run_path("plan.py")
    planned = capsys.readouterr().out
    assert f"```text\n{planned}```" in text
    assert planned.splitlines()[0].split()[-1] in files["private.yaml"]
    sizes = sys.modules.pop("project").SITES
    assert min(sizes.values()) == 32
    small = files["project.py"].replace("24 + 8 * n", "8 + n").replace("site, 24, 1", "site, 4, 1")
    assert small.count("8 + n") == small.count("site, 4, 1") == 1
    (tmp_path / "project.py").write_text(small)
    importlib.invalidate_caches()
    main(
        ["fit", "-c", "recipe.yaml", "-c", "private.yaml", "--trainer.max_rounds", "1", "--trainer.accelerator", "cpu"]
    )
    sys.modules.pop("project")
    rows = (tmp_path / "runs" / "sites" / "clients.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:9]] == list(sizes)


def test_every_picture_belongs_to_a_page():
    shown = {f"{page.stem}-{name}.png" for page in PAGES.values() for name in tutorials.pictures(page.read_text())}
    assert {path.name for path in (ROOT / "docs" / "assets" / "tutorials").glob("*")} == shown
