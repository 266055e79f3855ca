"""The command `doctor`: versions come from the packages, extras from pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_fed import __version__
from lightning_fed.cli import doctor
from lightning_fed.cli.main import main

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
MODULES = {"pillow": "PIL"}  # packages with another module name


def test_every_extra_for_users_has_a_feature():
    for_developers = {"dev", "docs", "oracles", "tests"}
    assert set(doctor.FEATURES) == set(PROJECT["optional-dependencies"]) - for_developers


def test_versions_are_those_of_the_packages():
    text = "\n".join(doctor.examine(PROJECT["dependencies"]))
    assert text.startswith(f"lightning-fed {__version__}\nPython 3.")
    listed = dict(re.findall(r"^  ([\w-]+) +(\d\S*)$", text, re.MULTILINE))
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]]
    assert list(listed) == names
    for name, version in listed.items():
        # Builds of torch for one device are named 2.14.1+cpu, in both places or in one.
        module = import_module(MODULES.get(name, name.replace("-", "_")))
        assert module.__version__.partition("+")[0] == version.partition("+")[0], name


def test_a_missing_extra_is_named_with_its_feature_and_command():
    requirements = ["torch>=2.7", 'no-such-package>=1; extra == "privacy"', 'numpy>=1; extra == "demo"']
    text = "\n".join(doctor.examine(requirements))
    part = re.search(r"^  privacy: (.*(?:\n    .*)*)", text, re.MULTILINE)[1].splitlines()
    assert part[0] == f"missing, for {doctor.FEATURES['privacy']}"
    assert part[1].split(maxsplit=1) == ["no-such-package", "missing   expected >=1"]
    assert part[2] == "    pip install 'lightning-fed[privacy]'"
    assert "  demo: installed" in text
    assert "lightning-fed[demo]" not in text


def test_a_version_out_of_bounds_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=99", "numpy>=1"])
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    version = re.escape(torch.__version__.partition("+")[0])
    assert re.search(rf"^  torch +{version}\S* +expected >=99$", said, re.MULTILINE)


def test_the_versions_come_before_the_import_of_torch():
    """The import takes seconds, and fails in a wrong environment."""
    code = (
        "import sys; from lightning_fed.cli import doctor; report = doctor.examine(['torch>=2.7']); "
        "lines = [next(report) for _ in range(6)]; print(lines[0], lines[4].split()[0], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"lightning-fed {__version__} torch False\n"


def test_a_healthy_installation_has_status_0(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2", 'no-such-package>=1; extra == "privacy"'])
    main(["doctor"])
    assert "pip install 'lightning-fed[privacy]'" in capsys.readouterr().out


def test_devices_are_those_that_torch_sees(monkeypatch):
    assert len(doctor.devices()) == 1 + max(1, torch.cuda.device_count() + torch.backends.mps.is_available())
    assert doctor.devices()[0].endswith(f"threads for PyTorch: {torch.get_num_threads()}")
