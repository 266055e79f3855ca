"""The command in `docs/guides/study.md` runs, in small: two clients, one round."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_fed.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = {
    "--data.num_clients": "2",
    "--data.test_fraction": "0.03",
    "--trainer.clients_per_round": "2",
    "--trainer.max_rounds": "1",
    "--trainer.local_epochs": "1",
    "--trainer.logger": "false",
}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command_of_the_guide(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "guides" / "study.md").read_text()
    (command,) = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "lightning-fed"
    end = arguments.index("--")
    overrides = dict(zip(arguments[end + 1 :: 2], arguments[end + 2 :: 2], strict=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    rest = [part for pair in (overrides | SMALL).items() for part in pair]
    main(["study", str(ROOT / arguments[1]), *arguments[2:end], "--min-support", "2", "--seeds", "1", "--", *rest])
    shown = capsys.readouterr().out
    assert re.search(r"^site +n +", shown, re.M)
    table = [line for line in Path("runs/study/study.md").read_text().splitlines() if line.startswith("|")]
    header = cells(table[0])
    shown_header = re.split(r" {2,}", re.search(r"^site +n .*", page, re.M)[0].strip())
    assert header == [name for name in shown_header if name != "gain by seed"]
    assert {line.split("|")[1].strip() for line in table[2:]} >= {"0", "1"}
    explained = re.findall(r"^\| ([\w ,]+) \|", page, re.M)
    names = [name for row in explained for name in row.split(", ")]
    assert {*shown_header} - {"site", "95 % interval"} <= set(names)
    files = {path.name for path in (tmp_path / "runs" / "study").iterdir()}
    assert set(re.findall(r"`((?:study|forest)\.\w+)`", page)) <= files
