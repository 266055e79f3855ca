"""The tutorial about studies in small: one round, local and federated, on the shared data."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_fed.cli.main import main
from lightning_fed.recipe import remembered_subclasses
from lightning_fed.study import site_scores

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "tutorials" / "study.md"
FILES = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^    lightning-fed (study .*)$", re.MULTILINE)
ONE_ROUND = ("--", "--trainer.max_rounds", "1", "--trainer.local_epochs", "1", "--trainer.accelerator", "cpu")

pytestmark = [
    pytest.mark.skipif(not (DATA / "retina").is_dir(), reason="the shared data are missing"),
    # Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


SITES = {
    "runs/retina": {"drive_canon_cr5": 20, "chase_nidek_nm200d": 4},  # patients
    "runs/camvid": {"0001TP": 15, "0006R0": 25, "0016E5": 51},  # frames
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("out", SITES)
def test_the_commands_of_the_tutorial(out, tmp_path, monkeypatch, capsys):
    page = PAGE.read_text()
    for name, text in FILES.findall(page):
        (tmp_path / name).write_text(text)
    (tmp_path / "data").symlink_to(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(site_scores, "REPLICATES", 20)
    (command,) = (line for line in COMMANDS.findall(page) if out in line)
    words = [word for word in shlex.split(command) if word != "central"]
    with remembered_subclasses():
        main([*words, *ONE_ROUND])
    study = json.loads((tmp_path / out / "study.json").read_text())
    counts = {site: int(answer["fedavg|local"]["all"][0]) for site, answer in study["answers"].items()}
    assert counts == SITES[out]
    assert set(study["kinds"].values()) == {"scores"}  # means over images
    assert "primary comparison" in capsys.readouterr().out
