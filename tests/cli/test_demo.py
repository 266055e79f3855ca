"""The demo at a small size: printed values equal logged values, and the report has each client's picture."""

import itertools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed.cli import demo_training
from lightning_fed.cli.demo_training import run_demo
from lightning_fed.cli.main import main
from lightning_fed.datasets import CamVid, Shapes
from lightning_fed.tasks import SegmentationTask
from tests.datasets.test_datasets import write_camvid_npz

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SMALL = {"num_clients": 3, "clients_per_round": 2, "num_scenes": 18}


def small_scenes(**options):
    return Shapes(**{**options, "num_val": 8, "image_size": 32})


def small_network(name, **options):
    options |= {"encoder_name": "resnet18", "model_kwargs": {"encoder_depth": 3, "decoder_channels": [8, 8, 8]}}
    return SegmentationTask("Unet", **options)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One small run: result and output."""
    folder, text = tmp_path_factory.mktemp("demo"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_training, "Shapes", small_scenes)
        patch.setattr(demo_training, "SegmentationTask", small_network)
        patch.setattr(sys.stdout, "write", text.append)
        result = run_demo(rounds=5, out=folder / "runs", **SMALL)
    return result, "".join(text)


def test_the_table_holds_the_logged_values(small):
    result, said = small
    lines = said.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("round"))
    assert re.split(r"\s{2,}", lines[head]) == [
        *("round", "clients", "loss", "val mIoU", "pixel acc", "MB up", "MB down", "seconds"),
    ]
    table = [[float(value) for value in line.split()] for line in lines[head + 1 : head + 6]]
    logged = EventAccumulator(str(result.log_dir)).Reload()

    def series(name):
        events = logged.Scalars(name)
        assert len({event.step for event in events}) == 5
        return pytest.approx([event.value for event in events], abs=0.00051)

    columns = [list(column) for column in zip(*table, strict=True)]
    assert columns[0] == [1, 2, 3, 4, 5]
    assert columns[1] == [2, 2, 2, 2, 2]
    assert not {"fed/clients", "fed/failed", "hp_metric"} & set(logged.Tags()["scalars"])  # constant
    assert columns[2] == series("train_loss")
    assert columns[3] == series("fed/val_miou/mean")
    assert columns[4] == series("fed/val_pixel_acc/mean")
    for column, direction in zip(columns[5:], ("up", "down"), strict=False):
        totals = [event.value for event in logged.Scalars(f"comm/total_{direction}_MB")]
        assert list(itertools.accumulate(column))[1:] == pytest.approx(totals, abs=0.3)
    assert all(seconds > 0 for seconds in columns[7])
    assert [row["val_loss"] for row in result.rounds] == series("val_loss")


def test_it_ends_with_the_command_and_the_report(small):
    result, said = small
    assert re.search(
        r"^BatchNorm: the clients' inputs differ, so each client .* \(shift 0\.\d\d after round 1\)\.$", said, re.M
    )
    last = said.splitlines()[-4:]
    assert re.fullmatch(rf"    \S*tensorboard --logdir {result.log_dir.parent}", last[1])
    assert last[3].strip() == str(result.report)
    assert result.report.parent == result.log_dir


def test_the_log_has_pictures_every_few_rounds_and_a_checkpoint(small):
    result, _ = small
    events = EventAccumulator(str(result.log_dir)).Reload()
    epochs = {event.step: event.value for event in events.Scalars("epoch")}
    assert [epochs[image.step] for image in events.Images("segmentation/clients/0")] == [0, 4]
    report = result.report.read_text()
    assert report.count("<img ") == SMALL["num_clients"]
    assert all(f"<th>{name}</th>" in report for name in small_scenes().class_names)
    assert len(list((result.log_dir / "checkpoints").glob("*.ckpt"))) == 1


@pytest.mark.slow
def test_it_takes_camvid(tmp_path, monkeypatch, capsys):
    write_camvid_npz(tmp_path / "camvid", {"train": {"A1": 24}, "val": {"A1": 9}}, plain_masks=True)
    monkeypatch.setattr(
        demo_training, "CamVid", lambda *args, **options: CamVid(*args, **{**options, "image_size": (32, 32)})
    )
    result = run_demo(tmp_path, rounds=1, out=tmp_path / "runs", num_clients=2, clients_per_round=1)
    assert "on CamVid: 24 images over 2 clients, 1 in a round" in capsys.readouterr().out
    assert len(result.rounds) == 1
    assert result.report.is_file()


@pytest.mark.slow
def test_it_takes_the_real_camvid(tmp_path, capsys):
    if not DATA.is_dir():
        pytest.skip(f"no data at {DATA}")
    result = run_demo(DATA, rounds=1, out=tmp_path, num_clients=24, clients_per_round=1)
    assert "on CamVid: 367 images over 24 clients, 1 in a round" in capsys.readouterr().out
    assert len(result.rounds) == 1
    assert result.report.is_file()


@pytest.mark.slow
def test_it_learns(tmp_path):
    result = run_demo(out=tmp_path, rounds=8)  # half of the demo, two minutes on a free core
    scores = [row["fed/val_miou/mean"] for row in result.rounds]
    assert max(scores[-4:]) > max(0.25, 1.5 * scores[0])


# Usage errors


def test_options_of_the_command(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo_training, "run_demo", lambda **options: seen.append(options))
    main(["demo"])
    main(["demo", "--data", "d", "--rounds", "3", "--out", "o"])
    assert seen == [
        {"data_dir": None, "rounds": 16, "out": Path("runs/demo")},
        {"data_dir": Path("d"), "rounds": 3, "out": Path("o")},
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--rounds", "0"], 2, "Expected `--rounds` to be at least 1, but got 0."),
        (["--rounds", "many"], 2, "invalid int value: 'many'"),
        (["--data", "nowhere"], 1, "under `data_dir`"),
    ],
)
def test_a_mistake_gets_a_short_answer(arguments, status, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == status
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(demo_training, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    with pytest.raises(SystemExit) as stopped:
        main(["demo"])
    assert stopped.value.code == 1
    assert "The demo needs tensorboard: pip install 'lightning-fed[demo]'" in capsys.readouterr().err


def test_the_command_for_tensorboard_works_without_an_activated_environment(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "tensorboard"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    assert demo_training._find_program("tensorboard") == "bin/tensorboard"  # noqa: SLF001
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo_training._find_program("tensorboard") == "tensorboard"  # noqa: SLF001
