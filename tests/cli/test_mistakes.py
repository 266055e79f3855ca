"""A wrong file or port ends a command with one line: expectation, value and remedy."""

import logging
import socket

import lightning as L
import pytest
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.cli.main import main
from lightning_fed.errors import OptionError


@pytest.fixture
def files(tmp_path):
    (tmp_path / "foreign").write_text('{"a": 1}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("merge", "missing", ["a readable file", "No such file", "correct the path"]),
        ("merge", "foreign", ["to be a checkpoint", "reading raises", "pass a file from `Trainer.save_checkpoint`"]),
        ("audit", "missing", ["a readable file", "No such file", "correct the path"]),
        ("audit", "foreign", ["or the file is not `site_record.jsonl`", "correct the path"]),
        ("audit", ".", ["a readable file", "Is a directory", "correct the path"]),
    ],
)
def test_a_wrong_file(command, name, words, files, capsys):
    file = str(files / name)
    with pytest.raises(SystemExit):
        main([command, file, *(["-o", "merged.ckpt"] if command == "merge" else [])])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert all(word in line for word in [*words, str(files)])


@pytest.mark.parametrize("option", ["--control-port", "--host"])
def test_a_port_in_use(option, tmp_path, monkeypatch):
    start = pytest.importorskip("lightning_fed.backends.flower.start")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(start, "_run_together", lambda *args, **options: pytest.fail("started"))
    for file in ("ca.crt", "server.crt", "server.key"):
        (tmp_path / file).touch()
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        ports = {"--control-port": (start.free_port(), port), "--host": (port, start.free_port())}
        with pytest.raises(OptionError, match=rf"listen at 127.0.0.1:{port}, but got .*: set .*`{option}`"):
            start.start_server(tmp_path, f"127.0.0.1:{ports[option][0]}", port=ports[option][1])


def test_commands_hide_lightnings_devices_and_tips(caplog, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-fed"])
    with pytest.raises(SystemExit):
        main(["fit", "-c", "missing.yaml"])
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        rank_zero_info("The fit has ended.")
    assert [record.getMessage() for record in caplog.records] == ["The fit has ended."]
