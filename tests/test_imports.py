"""Imports of the package: with a Trainer no more than Lightning's imports; lists and help texts need no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from lightning_fed.cli.main import PROGRAMS
from tests import warm_process

SLOW = ("torchvision", "segmentation_models_pytorch", "timm", "matplotlib", "scipy", "flwr", "tensorboard")

FIRST = [
    *(f"import lightning_fed.{room}" for room in ("algorithms", "callbacks", "metrics", "privacy", "tasks.base")),
    "from lightning_fed.cli import methods; methods.run(['fedavg'])",
]

# Each statement has a separate process with only Lightning imported.
SCRIPT = """
import json, os, sys
import lightning, torchmetrics

def fails(statement):
    child = os.fork()
    if not child:
        exec(statement)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

print(json.dumps([statement for statement in sys.argv[1:] if fails(statement)]))
"""


@pytest.fixture(scope="module")
def imports():
    record = json.loads(warm_process.run("tests.warm_imports")[0])
    if "lightning_fed" in record["added"]:
        return record
    # Earlier tests started processes of the package itself, in which the package is imported before the record.
    command = [sys.executable, "-m", "tests.warm_imports"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=warm_process.ROOT)
    return json.loads(done.stdout)


def test_the_package_asks_for_nothing_slow(imports):
    assert "torch" in imports["asked"]  # requests are recorded
    assert not set(imports["asked"]) & set(SLOW)


def test_nothing_slow_is_loaded_that_lightning_does_not_load(imports):
    added = {name.partition(".")[0] for name in imports["added"]}
    assert "lightning_fed" in added
    assert not added & set(SLOW)


def test_the_command_line_is_not_loaded(imports):
    assert not {"lightning_fed.cli.main", "lightning_fed.cli.demo"} & set(imports["added"])


WITHOUT_TORCH = """
import contextlib, importlib, io, json, sys, traceback
sys.modules.update(torch=None, lightning=None)
from lightning_fed.cli.main import main

for arguments in json.loads(sys.argv[1]):
    status, text = 0, io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(arguments)
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = traceback.format_exc()
    print(json.dumps([status, text.getvalue()]))
"""
RECIPE = str(Path(__file__).parents[1] / "recipes" / "shapes_deeplab.yaml")
FAST = [
    *(([name, "--help"], 0, f"usage: lightning-fed {name}") for name in PROGRAMS),
    *(([name, "--bogus"], 2, f"usage: lightning-fed {name}") for name in PROGRAMS),
    (["--help"], 0, "usage: lightning-fed"),
    (["recipes"], 0, "shapes_deeplab"),
    (["fitt"], 2, "Did you mean 'fit'?"),
    (["doctor"], 0, "torch cannot be imported: ModuleNotFoundError"),
    (["methods"], 0, "fedmargin"),
    (["methods", "fedproxx"], 2, "Did you mean 'fedprox'?"),
    (["merge", "a.ckpt", "b.ckpt", "-o", "c.ckpt", "--mode", "shrink"], 2, "grow"),
    (["merge", "a.ckpt", "-o", "a.ckpt"], 2, "Expected `--out` to differ"),
    (["adapt", "a.ckpt", "-o", "a.ckpt"], 2, "Expected `--out` to differ"),
    (["audit", "absent.jsonl"], 1, "absent.jsonl"),
    (["demo", "--rounds", "0"], 2, "Expected `--rounds` to be at least 1"),
    (["nvflare", "new", "--help"], 0, "RECIPE"),
    (["flower", "certificates", "keys", "--name", "server"], 0, "server.crt"),
    (["flower", "node", "app", "--client", "a", "--keys", "keys", "--address", "here"], 1, "here"),
    (["certify", ".", "--check", "key.pub", "--out", "key.pub"], 1, "changed: the certificate itself"),
    (["privacy", "absent.yaml"], 1, "absent.yaml"),
    (["privacy", RECIPE], 1, "CentralDP"),
]


def test_commands_without_a_model_need_no_torch(tmp_path):
    """Help and usage errors for all commands, in one process."""
    key = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "key.pub").write_bytes(key)
    commands = json.dumps([arguments for arguments, *_ in FAST])
    command = [sys.executable, "-c", WITHOUT_TORCH, commands]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for (arguments, status, says), line in zip(FAST, done.stdout.splitlines(), strict=True):
        found, text = json.loads(line)
        assert found == status, (arguments, found, text)
        assert says in text, arguments


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_any_folder_may_be_imported_first():
    """Packages re-export each other's names, and methods' names load with the first method."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *FIRST]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
