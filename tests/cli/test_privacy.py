"""``lightning-fed privacy``: the budget of a recipe before training."""

import re
from pathlib import Path

import pytest

from lightning_fed.cli.main import main
from lightning_fed.privacy import Budget

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

RECIPE = str(Path(__file__).parents[2] / "recipes" / "synthetic.yaml")  # 30 clients, 30 rounds


def said(capsys, privacy, *options):
    main(["privacy", RECIPE, *options, "--", "--trainer.steps", privacy, "--trainer.clients_per_round", "1.0"])
    return capsys.readouterr().out


def rows(text, header):
    table = re.search(rf"^ *{header}  .*\n[- ]+\n((?:.+\n)+)", text, re.M)[1]
    return {name: float(value) for name, value in map(str.split, table.splitlines())}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_given_noise(capsys):
    text = said(capsys, "[{class_path: CentralDP, init_args: {clip: 0.5, delta: 0.01, noise_multiplier: 2.0}}]")
    assert "30 of 30 clients in a round (poisson), 30 rounds, delta 0.01 (rdp)" in text
    assert "noise multiplier 2, clip 0.5: the noise in a round's sum has standard deviation 1 " in text
    budget = Budget(2.0, 0.01, 30, 30)
    epsilons = rows(text, "rounds")
    assert list(epsilons) == ["1", "4", "8", "12", "15", "19", "23", "27", "30"]
    for number, epsilon in epsilons.items():
        assert epsilon == pytest.approx(budget.epsilon(int(number)), rel=1e-3)
    for epsilon, z in rows(text, "epsilon after 30 rounds").items():
        assert Budget(z, 0.01, 30, 30).epsilon(30) == pytest.approx(float(epsilon), rel=5e-3)


def test_an_audit(capsys):
    privacy = "[{class_path: CentralDP, init_args: {clip: 0.5, delta: 0.01, noise_multiplier: 2.0}}]"
    main(["privacy", RECIPE, "--audit", "--", "--trainer.steps", privacy, "--trainer.clients_per_round", "1.0"])
    claimed = Budget(2.0, 0.01, 30, 30).epsilon(30)
    found = re.search(
        r"audit with 30 canary clients: (\d) of 6 .* at least (\S+) .* the budget claims (\S+)", capsys.readouterr().out
    )
    assert float(found[3]) == pytest.approx(claimed, rel=1e-3)
    assert float(found[2]) < claimed


def test_an_epsilon(capsys):
    text = said(capsys, "[{class_path: CentralDP, init_args: {clip: 0.5, delta: 0.01, epsilon: 4.0, sampling: fixed}}]")
    assert "30 of 30 clients in a round (fixed)" in text
    assert rows(text, "rounds")["30"] == pytest.approx(4.0, rel=1e-3)


def test_a_step_of_the_method_inside(capsys):
    """The command searches the whole chain, not only the first step."""
    central = "{class_path: CentralDP, init_args: {clip: 0.5, delta: 0.01, noise_multiplier: 2.0}}"
    others = "{class_path: MaxNorm, init_args: {bound: 1.0}}"
    assert said(capsys, f"[{others}, {central}]") == said(capsys, f"[{central}]")


def test_a_figure(capsys, tmp_path, monkeypatch):
    """The curves are bounds for the given noise, half the noise and twice the noise."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig

    def seen(figure, path, **options):
        drawn.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", seen)
    privacy = "[{class_path: CentralDP, init_args: {clip: 0.5, delta: 0.01, noise_multiplier: 2.0, max_epsilon: 9.0}}]"
    given = ["--", "--trainer.steps", privacy, "--trainer.clients_per_round", "1.0"]
    main(["privacy", RECIPE, "--figure", str(tmp_path / "epsilon.png"), *given])
    assert "noise multiplier 2, clip 0.5" in capsys.readouterr().out
    assert (tmp_path / "epsilon.png").read_bytes().startswith(b"\x89PNG")
    *lines, bound = drawn[0].axes[0].lines
    assert set(bound.get_ydata()) == {9.0}
    for line, z in zip(lines, (1.0, 2.0, 4.0), strict=True):
        budget = Budget(z, 0.01, 30, 30)
        assert line.get_label() == f"noise multiplier {z:.3g}"
        assert list(line.get_ydata()) == pytest.approx([budget.epsilon(int(number)) for number in line.get_xdata()])
        assert list(line.get_xdata())[::29] == [1, 30]


def test_a_recipe_without(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["privacy", RECIPE])
    assert stopped.value.code == 1
    assert "Expected a recipe with `CentralDP` among the `steps` of `trainer`" in capsys.readouterr().err
