"""The command in `docs/guides/study.md` runs, in small: fewer and smaller images, one round."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_fed.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = {
    "--data.source.num_train": "36",
    "--data.source.image_size": "32",
    "--trainer.max_rounds": "1",
    "--trainer.local_epochs": "1",
    "--trainer.logger": "false",
}


# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command_of_the_guide(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "guides" / "study.md").read_text()
    (command,) = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "lightning-fed"
    recipe = ROOT / arguments[1]
    end = arguments.index("--")
    overrides = dict(zip(arguments[end + 1 :: 2], arguments[end + 2 :: 2], strict=True))
    text = recipe.read_text().replace("num_clients: 6", "num_clients: 2")
    (tmp_path / "recipe.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    rest = [part for pair in (overrides | SMALL).items() for part in pair]
    main(["study", "recipe.yaml", *arguments[2:end], "--min-support", "3", "--", *rest])
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in table[0].strip("|").split("|")]
    assert header == ["site", "n", "local", "fedavg", "central", "gain", "95 % interval", "shown from", "verdict"]
    assert [line.split("|")[2].strip() for line in table[2:]] == ["5", "5", "2 sites"]
    explained = re.findall(r"^\| ([\w ,]+) \|", page, re.M)
    names = [name for row in explained for name in row.split(", ")]
    assert {*header, "gain by seed"} - {"site", "95 % interval"} <= set(names)
    files = {path.name for path in (tmp_path / "runs" / "study").iterdir()}
    assert set(re.findall(r"`((?:study|forest)\.\w+)`", page)) <= files
