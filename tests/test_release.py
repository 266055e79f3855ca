"""A release: one version everywhere, contents of wheel and sdist, and workflows without missing targets."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lightning_fed import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_one_version_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f"copyright: Version {__version__}\n" in (ROOT / "mkdocs.yml").read_text()  # in the site's footer
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\w*\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    if headings[1:]:
        assert headings[1].startswith(f"[{__version__}]")


def commands(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(workflow):
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(workflow):
        program, *arguments = re.sub(r"\S*\$\{\{.*?\}\}", "", command).split()
        named = {argument for argument in arguments if "=" not in argument}
        assert named and named <= targets if program == "make" else (ROOT / program).is_file(), command


def test_workflows_test_every_python_that_is_claimed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    listed = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["oldest"]["steps"][1]["with"]["python-version"] == oldest == listed[0]
    assert jobs["newest"]["strategy"]["matrix"]["python"] == listed


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the wheel and in the sdist, and the page for the package index."""
    if not (find_spec("hatchling") and find_spec("hatch_fancy_pypi_readme")):
        pytest.skip("hatchling and hatch-fancy-pypi-readme, which build the package, are not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert wheel.name == f"lightning_fed-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        page = file.read(f"lightning_fed-{__version__}.dist-info/METADATA").decode()
        in_wheel = set(file.namelist())
    with tarfile.open(sdist) as file:
        in_sdist = {name.partition("/")[2] for name in file.getnames()}
    return in_wheel, in_sdist, page


def tracked(folder):
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a clone of the repository")
    return set(listed.stdout.split())


def test_what_wheel_and_sdist_hold(built):
    in_wheel, in_sdist, _ = built
    package, recipes = tracked("lightning_fed"), tracked("recipes")
    assert "lightning_fed/py.typed" in package
    notes = {name for name in in_wheel if name.startswith(f"lightning_fed-{__version__}.dist-info/")}
    assert in_wheel - notes == package | {f"lightning_fed/{name}" for name in recipes}
    others = {".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert in_sdist == package | recipes | tracked("examples") | others


def test_links_of_the_package_index_lead_out_of_it(built):
    targets = re.findall(r"\]\(([^)]+)\)", built[2])
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


# --- Commit hooks -----------------------------------------------------------------------------------------------------


def test_the_hook_runs_the_ruff_of_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["tests"]
    assert f"ruff=={hooks[0]['rev'].removeprefix('v')}" in tools


@pytest.mark.parametrize(
    ("message", "is_allowed"),
    [
        (72 * "a", True),
        (73 * "a", False),
        ("Add a limit\n\nReason.", True),
        ("Add a limit\nReason.", False),
        ("Add a limit\n# comment of git", True),
        (f'Revert "{72 * "a"}"', True),
    ],
)
def test_a_commit_has_a_short_subject(message, is_allowed, tmp_path):
    file = tmp_path / "message"
    file.write_text(message + "\n")
    run = subprocess.run([ROOT / ".ci" / "commit-subject", file], capture_output=True, check=False)
    assert (run.returncode == 0) == is_allowed
