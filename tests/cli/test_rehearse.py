"""The command `lightning-fed rehearse`, as in the guide."""

import re
from pathlib import Path

import pytest

from lightning_fed.cli.main import main
from tests.breadth import quick

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "rehearsal.md"


@pytest.mark.parametrize("is_short", quick([True, False], [True]))
def test_the_guide_shows_the_commands_and_the_result(is_short, tmp_path, monkeypatch, capsys):
    """The short case has fewer rehearsals and rounds than the guide, so the numbers differ."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    (sites,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    recipe, summary, replay = re.findall(r"^lightning-fed (.*)$", page, re.M)
    (text,) = re.findall(r"```text\n(.*?)\n```", page, re.S)
    Path("sites.toml").write_text(sites)
    words, _, file = recipe.partition(" > ")
    main(words.split())
    Path(file).write_text(capsys.readouterr().out)
    if is_short:
        summary = summary.replace("--seeds 10 --rounds 10", "--seeds 3 --rounds 3")
        replay = re.sub(r"--rounds 10 --seed \d+", "--rounds 3 --seed 0", replay)
    main(summary.split())
    shown = capsys.readouterr().out
    if is_short:
        assert shown.startswith("3 rehearsals of 3 rounds with 4 clients.")
        assert {line.split()[0] for line in re.findall(r"^[a-z]+  .*", shown, re.M)} >= {"rounds", "hours", "megabytes"}
    else:
        assert shown.startswith(text)
    with pytest.raises(SystemExit) as end:
        main(replay.split())
    assert end.value.code == 0
    events = capsys.readouterr().out
    assert Path(f"runs/rehearsal/seed_{replay.split()[-1]}.log").read_text() == events
    assert shown.count("\nSeed ") == 3
    assert events.splitlines()[-1] in shown


@pytest.mark.parametrize(
    ("sites", "options", "message"),
    [
        ("[sites.a]\n", ["--seeds", "0"], "`--seeds` to be at least 1"),
        ("[sites.a]\nspeed = 1\n", [], "'speed'"),
        ("[deadline]\nminutes = 1\n[sites.a]\n", [], "minutes"),
        ("[sites.a]\n", ["--train"], "Expected 30 sites"),
    ],
)
def test_wrong_arguments_end_the_command(sites, options, message, tmp_path, capsys):
    (tmp_path / "sites.toml").write_text(sites)
    recipe = Path(__file__).parents[2] / "recipes" / "synthetic.yaml"
    with pytest.raises(SystemExit):
        main(["rehearse", str(recipe), "--sites", str(tmp_path / "sites.toml"), *options])
    assert message in capsys.readouterr().err
