"""The command `completion`: a shell that reads its script completes commands, options, methods and recipes."""

import shlex
import shutil
import subprocess

import pytest

from lightning_fed.algorithms import METHODS
from lightning_fed.cli.main import main
from lightning_fed.cli.recipes import recipe_folder


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for bash, in a file."""
    pytest.importorskip("shtab", reason="the extra `completion` is not installed")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    path = tmp_path_factory.mktemp("completion") / "lightning-fed"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("sys.stdout.write", lines.append)
        main(["completion", "bash"])
    path.write_text("".join(lines))
    return path


def complete(script, *words):
    """What bash would offer for the last of the words."""
    program = (
        f"source {shlex.quote(str(script))};"
        f" COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1};"
        ' COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE};'
        " $(complete -p lightning-fed | sed -E 's/.*-F ([^ ]+).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=script.parent)
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def test_commands(script):
    assert complete(script, "lightning-fed", "comp") == {"compare", "completion"}
    assert {"fit", "demo", "doctor", "recipes", "flower"} <= complete(script, "lightning-fed", "")


def test_options(script):
    assert complete(script, "lightning-fed", "fit", "--trainer.max_r") == {"--trainer.max_rounds"}
    assert complete(script, "lightning-fed", "fit", "--trainer.prec") == {"--trainer.precision"}
    assert complete(script, "lightning-fed", "demo", "--ro") == {"--rounds"}


def test_values(script):
    (script.parent / "mine.yaml").touch()
    expected = {name for name in METHODS if name.startswith("fedp")}
    assert len(expected) > 1
    assert complete(script, "lightning-fed", "methods", "fedp") == expected
    assert complete(script, "lightning-fed", "compare", "mine.yaml", "--methods", "fedp") == expected
    assert complete(script, "lightning-fed", "fit", "--trainer.method", "fedp") == expected
    recipes = {path.stem for path in recipe_folder().glob("shapes*.yaml")}
    assert complete(script, "lightning-fed", "recipes", "shapes") == recipes
    assert complete(script, "lightning-fed", "fit", "-c", "mi") == {"mine.yaml"}


def test_an_unknown_shell(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "cmd.exe"])
    assert stopped.value.code == 2
    assert "cmd.exe" in capsys.readouterr().err
