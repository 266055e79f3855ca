"""Segmentations by client: scores by hand with each client's model, chosen images, and written files."""

import csv
import logging
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, LocalStatistics
from lightning_fed.callbacks import ClientSegmentations, pictures
from lightning_fed.callbacks.client_segmentations import heat_map, scores_for
from lightning_fed.callbacks.picture_grid import default_colors, segmentation_grid
from lightning_fed.metrics.functional.entropy import softmax_entropy
from tests import models
from tests.breadth import quick, slow
from tests.callbacks.test_segmentation_images import logged
from tests.recorders import SpoilsFiles, assert_same, state_of

NAMES = ("ground", "box", "disc")
WITH_AXES = (
    "test_a_picture_says_which_image_it_shows_and_what_its_colours_mean",
    "test_a_binary_task_is_scored_by_its_class",
)


@pytest.fixture(autouse=True)
def no_axes(request, monkeypatch):
    """Axes and texts take longer than a small fit, so only tests of pictures draw with matplotlib."""
    if request.node.originalname not in WITH_AXES:
        monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, models.CLASSES, 1))


def module():
    return models.Module(net(), models.adam, loss=partial(F.cross_entropy, ignore_index=255))


def validation():
    """Five and four images; `b` lacks the last class, and one image of `b` has no labels."""
    scenes = models.scenes({"a": 5, "b": 4})
    scenes["b"][1].clamp_(max=1)
    scenes["b"][1][1] = 255
    scenes["a"][1][0, :5] = 255
    return scenes


def data():
    val = {name: DataLoader(TensorDataset(*tensors), 2) for name, tensors in validation().items()}
    return FederatedDataModule(models.as_datasets(models.scenes({"a": 6, "b": 5})), val, batch_size=3)


def ious(prediction, truth):
    """IoU and Dice by class, for classes in truth or prediction."""
    prediction, truth = prediction[truth != 255], truth[truth != 255]
    found = {}
    for label in range(models.CLASSES):
        p, t = prediction == label, truth == label
        if (p | t).any():
            found[label] = (p & t).sum() / (p | t).sum(), 2 * (p & t).sum() / (p.sum() + t.sum())
    return found


def predict(trainer, client, images):
    own = module().eval()
    own.load_state_dict(trainer.federation.client_state(client))
    with torch.no_grad():
        return own(images)


def rows_of(path):
    with path.open() as file:
        return [
            (int(r["round"]) - 1, r["client"], r["class"], float(r["iou"]), float(r["dice"]))
            for r in csv.DictReader(file)
        ]


@pytest.mark.parametrize("mode", [LocalStatistics(), "recalibrate"], ids=["local", "recalibrate"])
def test_scores_and_pictures_are_those_of_each_clients_model(mode, federated_trainer, tmp_path, caplog):
    callback = ClientSegmentations(1, tmp_path / "out", NAMES)
    trainer = federated_trainer(
        max_rounds=2, batch_norm=mode, callbacks=[callback], logger=TensorBoardLogger(tmp_path / "logs")
    )
    trained = module()
    with caplog.at_level(logging.INFO, "lightning_fed"):
        trainer.fit(trained, datamodule=data())
    rows = rows_of(tmp_path / "out" / "scores.csv")
    for client, (images, masks) in validation().items():
        logits = predict(trainer, client, images)
        prediction = logits.argmax(1)
        expected = ious(prediction.numpy(), masks.numpy())
        found = {row[2]: row[3:] for row in rows if row[:2] == (1, client)}
        assert found.keys() == {NAMES[label] for label in expected}
        for label, scores in expected.items():
            assert found[NAMES[label]] == pytest.approx(scores, rel=1e-6)
        quality = {}
        for place in range(len(images)):
            by_class = ious(prediction[place].numpy(), masks[place].numpy())
            if (masks[place] != 255).any():
                quality[place] = np.mean([iou for iou, _ in by_class.values()])
        ordered = sorted(quality, key=quality.__getitem__)
        chosen = [ordered[0], ordered[(len(ordered) - 1) // 2]]
        picture = segmentation_grid(
            images[chosen], masks[chosen], prediction[chosen], default_colors(models.CLASSES),
            maps=[softmax_entropy(logits[chosen], normalize=True)],
        )  # fmt: skip
        with Image.open(tmp_path / "out" / "clients" / f"{client}.png") as file:
            drawn = torch.from_numpy(np.array(file)).permute(2, 0, 1)
        assert drawn.shape == picture.shape
        assert (drawn.int() - picture.int()).abs().max() <= 2  # entropies by batch, and over all images at once
    for tag in ("client_iou", "clients/a", "clients/b"):
        assert [round for round, _ in logged(trainer.loggers[0], f"segmentation/{tag}")] == [0, 1]
    table = (tmp_path / "out" / "scores.md").read_text()
    assert table.startswith("| client | mIoU | mDice | ground | box")
    last = [row for row in rows if row[:2] == (1, "a")]
    assert f"| a | {np.mean([row[3] for row in last]):.3f} | {np.mean([row[4] for row in last]):.3f} |" in table
    assert table.strip() in caplog.text
    assert trained.training


@pytest.mark.parametrize("names", [(), slow((("vessel",),)), ("skin", "vessel")])
def test_a_picture_says_which_image_it_shows_and_what_its_colours_mean(names, federated_trainer, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, pixels = [], pictures.figure_pixels
    monkeypatch.setattr(pictures, "figure_pixels", lambda figure: figures.append(figure) or pixels(figure))
    images, masks = validation()["a"]
    clients = {"a": TensorDataset(images, masks.clamp(max=1))}
    network = nn.Conv2d(3, 1, 1)
    trained = models.Module(
        network, models.adam, loss=lambda logits, mask: F.binary_cross_entropy_with_logits(logits[:, 0], mask.float())
    )
    callback = ClientSegmentations(1, tmp_path, names, ignore_index=None)
    trainer = federated_trainer(max_rounds=1, callbacks=[callback])
    trainer.fit(trained, datamodule=FederatedDataModule(clients, clients, batch_size=3))

    prediction = (network(images)[:, 0] > 0).numpy()
    truth = masks.clamp(max=1).numpy() > 0
    quality = sorted((p & t).sum() / (p | t).sum() for p, t in zip(prediction, truth, strict=True) if (p | t).any())
    (figure,) = (figure for figure in figures if figure.get_suptitle() == "client a, round 1")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["image", "truth", "prediction", "entropy"]
    middle = quality[(len(quality) - 1) // 2]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        f"worst, IoU {quality[0]:.2f}", f"median, IoU {middle:.2f}"
    ]  # fmt: skip
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [*(names[:-1] or ("background",)), *(names[-1:] or "1")]
    colors = [[round(255 * value) for value in patch.get_facecolor()[:3]] for patch in legend.get_patches()]
    assert colors == [list(color) for color in default_colors(2)]


@pytest.mark.parametrize("has_axes", quick([True, False], [False]))
def test_it_changes_nothing(has_axes, federated_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: has_axes)
    states = []
    for callbacks in ([], [ClientSegmentations(1, tmp_path)]):
        trained = module()
        trainer = federated_trainer(
            max_rounds=2, batch_norm=LocalStatistics(), clients_per_round=1, callbacks=callbacks, seed=2
        )
        trainer.fit(trained, datamodule=data())
        states.append((state_of(trained), {name: float(v) for name, v in trainer.callback_metrics.items()}))
    assert_same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_every_few_rounds_and_after_a_resume(federated_trainer, tmp_path):
    def run(folder, rounds, ckpt_path=None):
        callback = ClientSegmentations(2, tmp_path / folder / "out")
        checkpoint = ModelCheckpoint(tmp_path / folder, save_last=True)
        trainer = federated_trainer(
            max_rounds=rounds, callbacks=[callback, checkpoint], seed=2, enable_checkpointing=True
        )
        trainer.fit(module(), datamodule=data(), ckpt_path=ckpt_path)
        return callback.rows

    whole = run("one", 3)
    assert sorted({row[0] for row in whole}) == [0, 2]
    run("two", 1)
    assert run("two", 3, tmp_path / "two" / "last.ckpt") == whole
    assert rows_of(tmp_path / "two" / "out" / "scores.csv") == whole


def test_names_of_clients_as_files_and_validation_by_itself(federated_trainer, tmp_path):
    tensors = validation()["a"]
    clients = {"ward 3/left": TensorDataset(*tensors), "iou": TensorDataset(*tensors)}
    callback = ClientSegmentations(5, tmp_path / "out")
    trainer = federated_trainer(max_rounds=1, callbacks=[callback])
    datamodule = FederatedDataModule(clients, clients, batch_size=3)
    trainer.fit(module(), datamodule=datamodule)
    trainer.validate(module(), datamodule=datamodule, verbose=False)
    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png"))
    assert names == ["clients/iou.png", "clients/ward 3%2Fleft.png", "iou.png"]
    assert {row[0] for row in callback.rows} == {0}  # the round of the model
    rows = list(callback.rows)
    trainer.validate(module(), datamodule=datamodule, verbose=False)
    assert [row[:3] for row in callback.rows] == [row[:3] for row in rows]  # the same round again
    assert {row[2] for row in callback.rows} <= {"0", "1", "2"}


@pytest.mark.parametrize(
    ("names", "name"), [slow(((), "1")), (["tumour"], "tumour"), (["healthy", "tumour"], "tumour")]
)
def test_a_binary_task_is_scored_by_its_class(names, name, federated_trainer, tmp_path):
    """Equals the log of `SegmentationTask`; a client without true and predicted pixels has no score."""

    def loss(logits, mask):
        valid = mask != 255
        return F.binary_cross_entropy_with_logits(logits[:, 0][valid], mask[valid].float())

    clients = validation()
    clients["b"][1].clamp_(max=0)
    clients["b"][0].mul_(0)
    clients["a"][1][(clients["a"][1] == 2)] = 1
    callback = ClientSegmentations(1, tmp_path, names, target=1)
    network = nn.Conv2d(3, 1, 1)
    nn.init.ones_(network.weight)
    nn.init.constant_(network.bias, -0.5)
    trainer = federated_trainer(callbacks=[callback])
    datasets = models.as_datasets(clients)
    trained = models.Module(network, models.adam, loss=loss)
    trainer.validate(trained, datamodule=FederatedDataModule(datasets, datasets, batch_size=2), verbose=False)
    images, masks = clients["a"]
    with torch.no_grad():
        positive, truth = (network(images)[:, 0] > 0) & (masks != 255), masks == 1
    assert [row[1:3] for row in callback.rows] == [("a", name)]
    assert callback.rows[0][3] == pytest.approx(float((positive & truth).sum() / (positive | truth).sum()), rel=1e-6)
    assert (tmp_path / "clients" / "a.png").exists()


def test_a_task_of_several_labels_is_scored_and_not_drawn(federated_trainer, tmp_path):
    images = validation()["a"][0]
    masks = torch.randint(3, (5, 2, *images.shape[2:]), generator=torch.Generator().manual_seed(1))
    masks[masks == 2] = 255
    clients = {"a": TensorDataset(images, masks)}
    callback = ClientSegmentations(1, tmp_path, ["left", "right"], target=1)
    torch.manual_seed(0)
    network = nn.Conv2d(3, 2, 1)
    trained = models.Module(network, models.adam, loss=lambda logits, mask: logits.sum() * 0)
    datamodule = FederatedDataModule(clients, clients, batch_size=2)
    federated_trainer(callbacks=[callback]).validate(trained, datamodule=datamodule, verbose=False)
    with torch.no_grad():
        positive, truth = (network(images) > 0) & (masks != 255), masks == 1
    both, any_of_both = (positive & truth).sum((0, 2, 3)), (positive | truth).sum((0, 2, 3))
    assert [row[2] for row in callback.rows] == ["left", "right"]
    assert [row[3] for row in callback.rows] == pytest.approx((both / any_of_both).tolist(), rel=1e-6)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["iou.png"]


def test_as_many_batches_as_the_trainer_validates(federated_trainer, tmp_path):
    read = []

    class Noting(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loaders = {"a": DataLoader(Noting(*validation()["a"]), 2)}
    trainer = federated_trainer(max_rounds=1, callbacks=[ClientSegmentations(1, tmp_path)], limit_val_batches=1)
    trainer.fit(module(), datamodule=FederatedDataModule(models.as_datasets(validation()), loaders, batch_size=3))
    assert set(read) == {0, 1}


def test_a_client_whose_files_are_spoiled_is_left_out(federated_trainer, tmp_path, caplog):
    callback, store = ClientSegmentations(1, tmp_path), tmp_path / "store"
    callbacks = [callback, SpoilsFiles(store, "a")]
    trainer = federated_trainer(max_rounds=1, batch_norm=LocalStatistics(), store=store, callbacks=callbacks)
    trainer.fit(module(), datamodule=data())
    assert {row[1] for row in callback.rows} == {"b"}
    assert (
        "Client 'a' is excluded from the segmentation scores: the client's stored state cannot be read" in caplog.text
    )


def test_scores_are_counted_where_the_logits_are():
    logits, mask = torch.empty(1, 3, 2, 2, device="meta"), torch.empty(1, 2, 2, device="meta")
    assert scores_for(logits, mask, 255).device.type == "meta"


@pytest.mark.parametrize("has_axes", [True, False])
def test_the_heat_map_has_a_row_for_each_class_of_each_client(has_axes, monkeypatch):
    drawn, render = [], pictures.figure_pixels
    monkeypatch.setattr(pictures, "figure_pixels", lambda figure: drawn.append(figure) or render(figure))
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: has_axes)
    values = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [0.5, torch.nan]])  # b x; a x; a y
    rows = [(0, "b", "x", 1.0, 1.0), (0, "a", "x", 0.0, 0.0), (0, "a", "y", 0.5, 0.5), (3, "b", "x", 0.0, 0.0)]
    picture = heat_map(rows)
    assert picture.dtype == torch.uint8
    if has_axes:
        (axes, _) = drawn[0].axes
        assert [text.get_text() for text in axes.get_yticklabels()] == ["b · x", "a · x", "a · y"]
        assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4"]
        cells = torch.as_tensor(np.array(axes.get_images()[0].get_array())).permute(2, 0, 1)
        assert torch.equal(cells, pictures.paint_numbers(values))
        return
    cells = picture[:, ::14, ::14]
    assert torch.equal(cells, pictures.paint_numbers(values))
    by_label = heat_map(rows, ["y", "x"])[:, ::14, ::14]
    assert torch.equal(by_label, pictures.paint_numbers(values[[0, 2, 1]]))


def test_without_clients_validation_data(federated_trainer, caplog, tmp_path):
    tensors = validation()["a"]
    trainer = federated_trainer(max_rounds=2, callbacks=[ClientSegmentations(1, tmp_path / "out")])
    trainer.fit(module(), models.as_datasets(validation()), DataLoader(TensorDataset(*tensors), 2))
    assert sum("has no data to evaluate, because" in message for message in caplog.messages) == 1
    assert not (tmp_path / "out").exists()


def test_mistakes(plain_trainer):
    with pytest.raises(ValueError, match="`every_n_epochs` to be at least 1, but got 0"):
        ClientSegmentations(0)
    with pytest.raises(Exception, match="with a `Federation` callback, but got none"):
        plain_trainer(max_epochs=1, callbacks=[ClientSegmentations()]).fit(module(), datamodule=data())


def with_void(void):
    scenes = models.scenes({"a": 4, "b": 3})
    return {name: (x, y.where(torch.arange(32) > 5, void)) for name, (x, y) in scenes.items()}


@pytest.mark.parametrize("void", quick([11, 3, -1], [11, -1]))
def test_the_loss_says_which_label_is_void(void, federated_trainer, tmp_path):
    """The scores equal the scores with the usual label; without evidence an error names the label."""
    rows = []
    for label, options in ((255, {"ignore_index": 255}), (void, {})):
        data = models.as_datasets(with_void(label))
        callback = ClientSegmentations(1, tmp_path, **options)
        trained = models.Module(net(), models.adam, loss=partial(F.cross_entropy, ignore_index=label))
        trainer = federated_trainer(max_rounds=1, callbacks=[callback], seed=1)
        trainer.fit(trained, datamodule=FederatedDataModule(data, data, batch_size=3))
        rows.append(callback.rows)
    assert rows[0] == rows[1]
    trained = models.Module(net(), models.adam, loss=lambda logits, mask: logits.square().mean())
    trainer = federated_trainer(max_rounds=1, callbacks=[ClientSegmentations(1, tmp_path, target=1)])
    with pytest.raises(MisconfigurationException, match=rf"but got the label {void}: .* set `ignore_index`"):
        trainer.fit(trained, datamodule=FederatedDataModule(data, data, batch_size=3))


def test_the_datamodule_names_the_classes(federated_trainer, tmp_path):
    data = models.as_datasets(with_void(255))
    datamodule = FederatedDataModule(data, data, batch_size=3)
    datamodule.class_names = [*NAMES]
    callback = ClientSegmentations(1, tmp_path)
    federated_trainer(max_rounds=1, callbacks=[callback]).fit(module(), datamodule=datamodule)
    assert {row[2] for row in callback.rows} == {*NAMES}


class ThirdTensor(models.Module):
    """Trains on the third of three tensors; the second has wrong masks."""

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[2])

    def validation_step(self, batch, batch_idx):
        pass


class Named(ThirdTensor):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch["image"], batch["mask"], batch["truth"]], batch_idx)


class AsDictionary(TensorDataset):
    def __getitem__(self, index):
        return dict(zip(("image", "mask", "truth"), super().__getitem__(index), strict=True))


@pytest.mark.parametrize(("kind", "form"), [(ThirdTensor, TensorDataset), (Named, AsDictionary)])
def test_the_scores_are_for_the_labels_in_the_loss(kind, form, federated_trainer, tmp_path):
    """Equal to a usual batch; validation batches with another structure need a `target`."""
    pairs = with_void(11)
    triples = {name: form(x, torch.zeros_like(y), y) for name, (x, y) in pairs.items()}
    loss, rows = partial(F.cross_entropy, ignore_index=11), []
    for used, data in ((models.Module, models.as_datasets(pairs)), (kind, triples)):
        callback = ClientSegmentations(1, tmp_path)
        trainer = federated_trainer(max_rounds=1, callbacks=[callback], seed=1)
        trainer.fit(used(net(), models.adam, loss=loss), datamodule=FederatedDataModule(data, data, batch_size=3))
        rows.append(callback.rows)
    assert rows[0] == rows[1]
    assert rows[0]
    other = FederatedDataModule(triples, models.as_datasets(pairs), batch_size=3)
    with pytest.raises(MisconfigurationException, match="with another structure: select the labels with `target`"):
        federated_trainer(max_rounds=1, callbacks=[ClientSegmentations(1, tmp_path)], seed=1).fit(
            kind(net(), models.adam, loss=loss), datamodule=other
        )
    callback = ClientSegmentations(1, tmp_path, target=1)
    trainer = federated_trainer(max_rounds=1, callbacks=[callback], seed=1)
    trainer.fit(kind(net(), models.adam, loss=loss), datamodule=other)
    assert callback.rows == rows[0]


def test_masks_of_several_labels_are_found(federated_trainer, tmp_path):
    images = validation()["a"][0]
    masks = torch.randint(2, (5, 2, *images.shape[2:]), generator=torch.Generator().manual_seed(1))
    data = {"a": TensorDataset(images, masks)}
    rows = []
    for options in ({}, {"target": 1}):
        callback = ClientSegmentations(1, tmp_path, **options)
        torch.manual_seed(0)
        loss = lambda logits, mask: F.binary_cross_entropy_with_logits(logits, mask.float())  # noqa: E731
        trained = models.Module(nn.Conv2d(3, 2, 1), models.adam, loss=loss)
        datamodule = FederatedDataModule(data, data, batch_size=2)
        federated_trainer(max_rounds=1, callbacks=[callback]).fit(trained, datamodule=datamodule)
        rows.append(callback.rows)
    assert rows[0] == rows[1] != []


def test_changed_masks_need_a_target(federated_trainer, tmp_path):
    data = models.as_datasets(with_void(11))
    trained = models.Module(net(), loss=lambda logits, mask: F.cross_entropy(logits, (mask + 1).clamp(max=2)))
    with pytest.raises(MisconfigurationException, match="pass `ClientSegmentations` a `target`"):
        federated_trainer(max_rounds=1, callbacks=[ClientSegmentations(1, tmp_path)]).fit(
            trained, datamodule=FederatedDataModule(data, data, batch_size=3)
        )
