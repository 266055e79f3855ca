"""The report: numbers equal the logged numbers, missing values stay missing, and the page is one sound file."""

import html
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed import ClientFault, FederatedCallback, FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation, ClientSegmentations, Report
from lightning_fed.privacy import CentralDP
from lightning_fed.report.page import HEIGHT, WIDTH, ClientRow, FitResults, Picture, line_chart, render_page
from tests import models
from tests.recorders import MemoryLogger, assert_same, state_of

ODD = "<b>&\"'"
SIZES = {"ann": 12, ODD: 9, "cid": 16}
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tables by id, as rows of (text, ``data-value``), and all tags with attributes; refuses unbalanced tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.tables, self.text = [], [], {}, ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables[attributes["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            value = attributes.get("data-value")
            self.rows[-1].append(["", None if value is None else float(value)])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1][0] += data

    def columns(self, name):
        """Values by the first cell and the heading; ``None`` for a dash."""
        head, *rows = self.tables[name]
        for row in rows:
            assert all((value is None) == (text in ("-", "")) for text, value in row[1:-1])
        return {row[0][0]: {title: cell[1] for (title, _), cell in zip(head, row, strict=True)} for row in rows}


class Fails(FederatedCallback):
    """The client with the odd name fails in round 2."""

    def on_client_batch(self, trainer, module, client, batch):
        if client == ODD and trainer.current_epoch == 1:
            raise ClientFault("its <disk> is full")
        return batch


def data(**options):
    return FederatedDataModule(
        models.as_datasets(models.vectors(SIZES)), models.as_datasets(models.vectors(SIZES)), **options
    )


def fit(federated_trainer, path, callbacks=(), datamodule=None, ckpt_path=None, **options):
    logger = MemoryLogger()
    trainer = federated_trainer(
        **{"max_rounds": 3, "callbacks": [Report(path), *callbacks], "logger": logger, "seed": 4, **options}
    )
    torch.manual_seed(0)
    trained = models.Module(models.mlp())
    trainer.fit(trained, datamodule=datamodule or data(), ckpt_path=ckpt_path)
    return trainer, trained, logger


def logged_by_round(logger):
    rounds = {}
    for _, metrics in logger.lines:
        rounds.setdefault(int(metrics["epoch"]), {}).update(metrics)
    return rounds


def test_numbers_in_the_report_are_the_logged_numbers(federated_trainer, tmp_path, caplog):
    evaluation = ClientEvaluation()
    with caplog.at_level("INFO", "lightning_fed"):
        _, _, logger = fit(federated_trainer, tmp_path / "a" / "r.html", [evaluation, Fails()])
    assert f"for a browser: {tmp_path / 'a' / 'r.html'}" in caplog.text
    page = Page((tmp_path / "a" / "r.html").read_text())
    table, logged = page.columns("rounds"), logged_by_round(logger)
    assert list(table) == ["1", "2", "3"]
    for round, values in logged.items():
        row = table[str(round + 1)]
        for title, name, factor in (
            ("clients", "fed/clients", 1),
            ("failed", "fed/failed", 1),
            ("MB sent to clients", "comm/down_bytes", 1e-6),
            ("MB sent by clients", "comm/up_bytes", 1e-6),
            ("train_loss", "train_loss", 1),
            ("val_loss", "val_loss", 1),
            ("val_acc", "val_acc", 1),
        ):
            assert row[title] == factor * values[name]
        assert row["seconds"] > 0
    clients = page.columns("clients")
    assert list(clients) == sorted(SIZES, key=lambda client: evaluation.results.values["val_acc"][client])
    for client, row in clients.items():
        assert row["val_acc"] == evaluation.results.values["val_acc"][client]
        assert row["gain"] == row["val_acc"] - logged[0][f"client/{client}/val_acc"]
        assert (row["evaluated examples"], row["updates used"], row["failures"]) == (
            SIZES[client],
            3 - (client == ODD),
            client == ODD,
        )
    assert page.tables["clients"][1 + list(clients).index(ODD)][-1][0] == "its <disk> is full"
    bars = [attributes["style"] for tag, attributes in page.tags if attributes.get("class") == "bar"]
    assert bars == [f"width:{100 * row['val_acc']:.1f}%" for row in clients.values()]
    points = [float(a["data-value"]) for tag, a in page.tags if tag == "circle"]
    curves = ("train_loss", "val_loss", "val_acc", "fed/val_acc/mean", "fed/val_acc/worst10")
    assert points == [logged[round][name] for name in curves for round in range(3)]
    facts = {row[0][0]: row[1][0] for row in page.tables["facts"]}
    assert facts["seed"] == "4"
    assert facts["clients"] == "3, 3 in a round"
    assert facts["rounds"] == "3 of 3"
    assert facts["sent by clients"] == f"{logged[2]['comm/total_up_bytes'] / 1e6:.2f} MB"
    assert f"torch {torch.__version__}" in facts["versions"]


def test_values_of_an_earlier_round_do_not_appear_in_a_round_without_evaluation(federated_trainer, tmp_path):
    path = tmp_path / "report.html"
    _, _, logger = fit(
        federated_trainer, path, [ClientEvaluation(every_n_rounds=2)], max_rounds=4, check_val_every_n_epoch=2
    )
    page, logged = Page(path.read_text()), logged_by_round(logger)
    assert ["val_acc" in logged[round] for round in range(4)] == [False, True, False, True]
    for round, values in logged.items():
        row = page.columns("rounds")[str(round + 1)]
        assert row["val_acc"] == values.get("val_acc")
        assert row["train_loss"] == values["train_loss"]
    points = [float(attributes["data-value"]) for tag, attributes in page.tags if tag == "circle"]
    curves = ("train_loss", "val_loss", "val_acc", "fed/val_acc/mean", "fed/val_acc/worst10")
    assert points == [values[name] for name in curves for values in logged.values() if name in values]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_fit_without_validation_has_no_scores(federated_trainer, tmp_path):
    path = tmp_path / "report.html"
    datamodule = FederatedDataModule(models.as_datasets(models.vectors(SIZES)))
    _, _, logger = fit(federated_trainer, path, datamodule=datamodule)
    page = Page(path.read_text())
    assert page.columns("rounds")["3"]["train_loss"] == logged_by_round(logger)[2]["train_loss"]
    assert [title for title, _ in page.tables["clients"][0]] == ["client", "updates used", "failures", "last failure"]
    assert "val_" not in page.text


def test_a_resumed_fit_has_the_report_of_one_fit(federated_trainer, tmp_path):
    pages, files = [], []
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        for rounds in lengths:
            saver = ModelCheckpoint(tmp_path / name, save_last=True)
            path, last = tmp_path / f"{name}.html", tmp_path / name / "last.ckpt"
            resumed = last if last.exists() else None
            fit(
                federated_trainer,
                path,
                [Fails(), saver],
                max_rounds=rounds,
                enable_checkpointing=True,
                ckpt_path=resumed,
            )
        pages.append(Page(path.read_text()))
        files.append(str(last))
    for table in ("rounds", "clients"):
        rows = [[[text for text, _ in row] for row in page.tables[table]] for page in pages]
        if table == "rounds":
            rows = [[[*row[:5], *row[6:]] for row in page] for page in rows]  # without seconds
        assert rows[0] == rows[1]
    facts = {row[0][0]: row[1][0] for row in pages[1].tables["facts"]}
    assert f"--ckpt_path {files[1]}" in facts["resume"]
    assert ("span", {"class": "whole"}) in pages[1].tags  # no line break inside an option


def test_an_interrupted_fit_reports_the_finished_rounds(federated_trainer, tmp_path):
    class Stops(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            if trainer.current_epoch == 2:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit(federated_trainer, tmp_path / "report.html", [Stops()])
    page = Page((tmp_path / "report.html").read_text())
    assert list(page.columns("rounds")) == ["1", "2"]
    assert {row[0][0]: row[1][0] for row in page.tables["facts"]}["rounds"] == "2 of 3"


def test_a_resumed_fit_that_fails_before_training_writes_no_file(federated_trainer, tmp_path, monkeypatch):
    class Stops(FederatedCallback):
        def on_fit_start(self, trainer, pl_module):
            raise RuntimeError("stop")

    saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(federated_trainer, tmp_path / "first.html", [saver], enable_checkpointing=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(RuntimeError, match="stop"):
        fit(
            federated_trainer,
            None,
            [saver, Stops()],
            max_rounds=4,
            enable_checkpointing=True,
            ckpt_path=tmp_path / "saved" / "last.ckpt",
        )
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_callback_changes_nothing(federated_trainer, tmp_path):
    states = []
    for callbacks in ([], [Report(tmp_path / "report.html")]):
        trainer = federated_trainer(max_rounds=2, callbacks=callbacks, seed=2)
        torch.manual_seed(0)
        trained = models.Module(models.mlp())
        trainer.fit(trained, datamodule=data())
        states.append((state_of(trained), {name: float(value) for name, value in trainer.callback_metrics.items()}))
    assert_same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_with_central_privacy_the_report_has_the_budget_and_no_clients(federated_trainer, tmp_path):
    path = tmp_path / "report.html"
    datamodule = FederatedDataModule(models.as_datasets(models.vectors(SIZES)))
    _, _, logger = fit(
        federated_trainer, path, datamodule=datamodule, max_rounds=1, clients_per_round=0.9,
        steps=[CentralDP(noise_multiplier=1.0, clip=1.0, delta=1e-3)],
    )  # fmt: skip
    page = Page(path.read_text())
    facts = {row[0][0]: row[1][0] for row in page.tables["facts"]}
    assert facts["privacy/epsilon"] == f"{logged_by_round(logger)[0]['privacy/epsilon']:.4g}"
    assert "clients" not in page.tables
    assert page.columns("rounds")["1"]["clients"] is None


def test_segmentations_appear_with_iou_and_pictures(federated_trainer, tmp_path):
    pytest.importorskip("matplotlib")
    tensors = models.scenes({"a": 5, ODD: 4})
    tensors["a"][1].clamp_(max=1)  # without the last classes
    clients = models.as_datasets(tensors)
    network = torch.nn.Conv2d(3, models.CLASSES, 3, padding=1)
    segmentations = ClientSegmentations(1, tmp_path / "s", ["ground", "<box>"])
    path = tmp_path / "report.html"
    trainer = federated_trainer(max_rounds=2, callbacks=[Report(path), segmentations])
    trainer.fit(models.Module(network, models.adam), datamodule=FederatedDataModule(clients, clients))
    page = Page(path.read_text())
    table = page.columns("iou")
    expected = {}
    for round, client, name, iou, _ in segmentations.rows:
        if round == 1:
            expected.setdefault(client, {})[name] = iou
    names = ["ground", "<box>", *map(str, range(2, models.CLASSES))]
    for client, row in table.items():
        assert row == {"client": None} | {name: expected[client].get(name) for name in names if name in row}
    assert "<h2>IoU by client and class, round 2</h2>" in path.read_text()
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 2
    assert all("true mask" in attributes["alt"] for attributes in pictures)


def page_with_everything():
    png = bytes.fromhex("89504e470d0a1a0a")
    rounds = {r: {"val_acc": r / 40, "train_loss": 2.0 - r / 30, "seconds": 1.0, "fed/clients": 3.0} for r in range(40)}
    clients = [ClientRow(ODD, 3, 1, "x" * 300, 8, {"val_acc": (0, 0.1)}, {"val_acc": (39, 0.4)})]
    iou = {(ODD, f"class {place}"): place / 30 for place in range(30)}
    facts = {"checkpoint": f"/{'long_name' * 40}.ckpt"}
    picture, names = Picture(ODD, png), [f"class {place}" for place in range(30)]
    return render_page(
        FitResults(ODD, facts, rounds, "val_acc", {"val_acc": True}, clients, iou, names, pictures=[picture])
    )


def test_the_page_is_one_file_that_fits_a_telephone():
    text = page_with_everything()
    page = Page(text)
    assert ODD in page.text
    assert "<b>&" not in text
    assert not re.search(r"https?:|src=\"(?!data:)|href=|@import|url\(|<script", text)
    for tag, attributes in page.tags:
        assert tag != "img" or attributes["alt"]
        assert tag != "svg" or attributes["aria-label"]
    for width in re.findall(r"(?<!max-)width:\s*(\d+)px", text):
        assert int(width) <= 350
    assert text.count('<div class="scroll">') == len(re.findall(r"<table id=\"(?:clients|iou|rounds)\"", text)) == 3
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_a_browser_shows_the_page_without_a_horizontal_scroll_bar(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs a browser: chromium or google-chrome")
    # A headless window has at least 500 pixels, so a frame has the width of a telephone.
    (tmp_path / "frame.html").write_text(
        f'<iframe id="f" style="width:390px;height:800px;border:0" srcdoc="{html.escape(page_with_everything())}">'
        "</iframe><p id=p></p><script>onload = () => { const d = f.contentDocument.documentElement;"
        " const images = f.contentDocument.images.length;"
        " p.textContent = `${f.clientWidth}: ${d.scrollWidth - d.clientWidth}, ${images} images` }</script>"
    )
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "390: 0, 1 images" in done.stdout
    assert "CONSOLE" not in done.stderr


def test_a_chart_places_each_point_on_its_axes():
    chart = line_chart("acc", {"a": {0: 0.2, 2: 0.6}, "b": {1: 0.35}})
    ticks = {label: float(place) for place, label in chart["y_ticks"]}
    rounds = {round: float(place) for place, round in chart["x_ticks"]}
    assert list(rounds) == [1, 2, 3]
    for line in chart["lines"]:
        for x, y, round, value in line["points"]:
            assert float(x) == rounds[round]
            low, high = min(map(float, ticks)), max(map(float, ticks))
            expected = ticks[f"{low:.6g}"] + (value - low) / (high - low) * (ticks[f"{high:.6g}"] - ticks[f"{low:.6g}"])
            assert float(y) == pytest.approx(expected, abs=0.11)
            assert 0 < float(x) < WIDTH
            assert 0 < float(y) < HEIGHT
