"""Options of `SegmentationTask`: losses, binary and multi-label masks, class scores, tiles, pretrained encoders."""

import copy
import logging

import lightning as L
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from lightning_fed.errors import OptionError
from lightning_fed.metrics import SegmentationScores
from lightning_fed.tasks import SegmentationTask
from lightning_fed.tasks.encoder_weights import load_encoder_weights
from lightning_fed.tasks.tiles import tiled_logits
from tests.recorders import loading
from tests.tasks.test_tasks import IGNORED, fit, images, labels, loader, masks, trainer


def task_of(mode, loss, num_classes=3, **options):
    return SegmentationTask(nn.Identity(), 1 if mode == "binary" else num_classes, loss=loss, mode=mode, **options)


# --- Losses by pixel --------------------------------------------------------------------------------------------------


def pairs(mode, logits, target):
    """Probabilities and true labels of counted pixels, one pair per class."""
    if mode == "multiclass":
        valid = target != IGNORED
        probabilities = logits.softmax(1).movedim(1, -1)[valid]
        return [(probabilities[:, c], (target[valid] == c).double()) for c in range(logits.shape[1])]
    target = target.reshape(logits.shape)
    found = []
    for c in range(logits.shape[1]):
        valid = target[:, c] != IGNORED
        found.append((logits[:, c][valid].sigmoid(), target[:, c][valid].double()))
    return found


def region_by_hand(score):
    """Mean over classes of 1 - score(p, t); 0 for a class without true pixels."""

    def loss(mode, logits, target):
        terms = [(1 - score(p, t)) * bool(t.any()) for p, t in pairs(mode, logits, target)]
        return torch.stack(terms).mean()

    return loss


def tversky(p, t):
    both = (p * t).sum()
    return both / (both + 0.3 * (p * (1 - t)).sum() + 0.7 * ((1 - p) * t).sum())


def focal_by_hand(mode, logits, target):
    """Mean over classes of the mean over pixels of -(1 - q)^2 log q, with q the probability of the truth.

    smp uses each class's logit separately, also for exclusive classes.
    """
    if mode == "multiclass":
        valid = target != IGNORED
        flat, truth = logits.movedim(1, -1)[valid], target[valid]
        found = [(flat[:, c].sigmoid(), (truth == c).double()) for c in range(logits.shape[1])]
    else:
        found = pairs(mode, logits, target)
    terms = []
    for p, t in found:
        q = torch.where(t == 1, p, 1 - p)
        terms.append((-((1 - q) ** 2) * q.log()).mean())
    return torch.stack(terms).mean()


def lovasz_by_hand(mode, logits, target):
    """The piecewise linear extension of the Jaccard loss at the errors, summed over the sorted levels."""

    def extension(errors, truth):
        order = errors.argsort(descending=True)
        total, previous = errors.new_zeros(()), 0.0
        num_true = truth.sum()
        for count in range(1, len(order) + 1):
            chosen = truth[order[:count]]
            jaccard = 1 - (num_true - chosen.sum()) / (num_true + (1 - chosen).sum())
            total = total + errors[order[count - 1]] * (jaccard - previous)
            previous = jaccard
        return total

    if mode == "multiclass":
        terms = [extension((t - p).abs(), t) for p, t in pairs(mode, logits, target) if t.any()]
        return torch.stack(terms).mean()
    target = target.reshape(logits.shape)
    valid = target != IGNORED
    truth = target[valid].double()
    return extension((1 - logits[valid] * (2 * truth - 1)).relu(), truth)


def ce_by_hand(mode, logits, target):
    if mode == "multiclass":
        return F.cross_entropy(logits, target, ignore_index=IGNORED)
    found = [torch.where(t == 1, p, 1 - p).log() for p, t in pairs(mode, logits, target)]
    return -torch.cat(found).mean()


LOSSES = {
    "ce": ce_by_hand,
    "dice": region_by_hand(lambda p, t: 2 * (p * t).sum() / (p + t).sum()),
    "jaccard": region_by_hand(lambda p, t: (p * t).sum() / (p + t - p * t).sum()),
    "tversky:alpha=0.3:beta=0.7": region_by_hand(tversky),
    "focal": focal_by_hand,
    "lovasz": lovasz_by_hand,
}


def data(mode, seed=0):
    """Logits, and masks with some ignored pixels; the last class does not occur."""
    logits = images(2, 1 if mode == "binary" else 3, 6, seed=seed).double()
    target = labels(2, 6, 6, classes=2, seed=seed)
    if mode == "multilabel":
        target = labels(2, 3, 6, 6, classes=2, seed=seed)
        target[:, 2] = 0
        target[0, 0, :4] = IGNORED
    target[..., :2, :] = IGNORED
    return logits.requires_grad_(), target


@pytest.mark.parametrize("mode", ["multiclass", "binary", "multilabel"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_by_hand_with_ignored_pixels(loss, mode):
    logits, target = data(mode)
    value, expected = task_of(mode, loss).compute_loss(logits, target), LOSSES[loss](mode, logits, target)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)  # smp's clamps and epsilons
    gradient, wanted = (torch.autograd.grad(number, logits, retain_graph=True)[0] for number in (value, expected))
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-7)
    assert not gradient[..., :2, :].any()


@pytest.mark.parametrize("mode", ["multiclass", "binary", "multilabel"])
@pytest.mark.parametrize("loss", ["jaccard", "lovasz", "focal", "ce+tversky", "dice"])
def test_nothing_is_learnt_where_everything_is_ignored(loss, mode):
    logits, target = data(mode)
    value = task_of(mode, loss).compute_loss(logits, torch.full_like(target, IGNORED))
    value.backward()
    assert value.item() == 0
    assert not logits.grad.any()


def test_sums_and_weights():
    logits, target = data("multilabel")
    weights = [1.0, 2.0, 3.0]
    value = task_of("multilabel", "ce+lovasz+focal", class_weights=weights).compute_loss(logits, target)
    valid = target != IGNORED
    cross = F.binary_cross_entropy_with_logits(logits, target.double().clamp(max=1), reduction="none")
    weighted = (cross * torch.tensor(weights)[:, None, None])[valid].mean()
    expected = weighted + lovasz_by_hand("multilabel", logits, target) + focal_by_hand("multilabel", logits, target)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("ignore_index", [IGNORED, None])
def test_classes_of_weight_0(ignore_index):
    """Weight 0 excludes a class; a batch with only this class has loss 0 and gradient 0, not NaN."""
    task = task_of("multiclass", "ce", class_weights=[0.0, 1.0, 2.0], ignore_index=ignore_index).double()
    logits, target = data("multiclass")
    target = target if ignore_index else target.where(target != IGNORED, 0)
    expected = F.cross_entropy(logits, target, torch.tensor([0.0, 1.0, 2.0], dtype=logits.dtype), ignore_index=IGNORED)
    assert task.compute_loss(logits, target).item() == pytest.approx(expected.item(), rel=1e-6)
    background = task.compute_loss(logits, torch.zeros_like(target))
    background.backward()
    assert background.item() == 0
    assert not logits.grad.any()


def test_a_function_of_ones_own(tmp_path):
    """The function receives the task's logits and masks; a checkpoint does not contain the function."""
    own = smp.losses.TverskyLoss("multiclass", alpha=0.2, beta=0.8, ignore_index=IGNORED)
    logits, target = data("multiclass")
    task = task_of("multiclass", own)
    assert task.compute_loss(logits, target).item() == own(logits, target).item()
    convolution = SegmentationTask(nn.Conv2d(3, 3, 1), 3, loss=lambda x, y: x.square().mean())
    fit(convolution, [(images(2, 3, 8), masks(2, 8))]).save_checkpoint(tmp_path / "own.ckpt")
    assert "loss" not in convolution.hparams
    SegmentationTask.load_from_checkpoint(tmp_path / "own.ckpt", model=nn.Conv2d(3, 3, 1), **loading(weights_only=True))


# --- Modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["binary", "multilabel"])
def test_steps_and_predictions_of_one_class_and_of_several_labels(mode):
    torch.manual_seed(0)
    count = 1 if mode == "binary" else 3
    task = SegmentationTask("Unet", count, mode=mode, loss="ce", lr=0.1, model_kwargs={
        "encoder_depth": 3, "decoder_channels": (16, 8, 8)})  # fmt: skip
    plain = copy.deepcopy(task.model).train()
    shape = (2, 32, 32) if mode == "binary" else (2, 3, 32, 32)
    x, mask = images(2, 3, 32), labels(*shape, classes=2)
    batch = (x, mask[:, None].to(torch.uint8)) if mode == "binary" else (x, mask)
    fit(task, [batch])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.binary_cross_entropy_with_logits(plain(x), mask.reshape(2, count, 32, 32).float()).backward()
    optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(task.model.state_dict()[name].float(), value.float(), atol=1e-6), name
    (prediction,) = trainer().predict(task, loader([x]))
    expected = (plain.eval()(x) > 0).long()
    assert torch.equal(prediction, expected.squeeze(1) if mode == "binary" else expected)


def test_masks_that_are_none_of_the_labels():
    with pytest.raises(ValueError, match=r"shape \(N, 3, H, W\) with mode='multilabel', but got \(2, 8, 8\)"):
        task_of("multilabel", "ce").split_batch((images(2, 3, 8), labels(2, 8, 8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ce+x"}, "`loss` to be a function or a sum of 'ce', 'dice', .* but got 'ce.x'"),
        ({"loss": "ce:alpha=1"}, "`loss` to be a function or a sum of"),
        ({"loss": "tversky:delta=1"}, r"options accepted by the loss 'tversky', but got \{'delta': 1\}"),
        ({"mode": "several"}, "`mode` to be one of .*'several'"),
        ({"mode": "binary"}, "`num_classes` to be 1 and no `class_weights` with mode='binary', but got 3"),
        ({"num_classes": 1}, "`num_classes` to be at least 2 .* mode='binary'"),
        ({"tile": (32, 0)}, r"`tile` to be a height and a width of at least 1, but got \(32, 0\)"),
        ({"tile_overlap": 1.0}, r"`tile_overlap` to be in \[0, 1\), but got 1.0"),
        ({"class_names": ["a", "b", "a"], "per_class": True}, "`class_names` to differ from one another"),
        ({"class_names": ["a"], "per_class": True}, "`class_names` to hold 3 names, but got 1"),
        ({"loss": "ce+lovasz:per_image=true"}, "`loss` without `per_image`, but got 'ce.lovasz:per_image=true'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        SegmentationTask(nn.Identity(), **{"num_classes": 3, **options})


# --- Scores -----------------------------------------------------------------------------------------------------------


def scores_by_hand(predictions, truths):
    """From sets of pixels: (IoU, Dice) by name of each class present; both arguments are lists of arrays, one per
    class.
    """
    found = {}
    for label, (prediction, truth) in enumerate(zip(predictions, truths, strict=True)):
        p, t = set(np.flatnonzero(prediction)), set(np.flatnonzero(truth))
        if p | t:
            found[label] = len(p & t) / len(p | t), 2 * len(p & t) / (len(p) + len(t))
    return found


@pytest.mark.parametrize("mode", ["multiclass", "binary", "multilabel"])
def test_scores_are_those_of_sets_of_pixels(mode):
    count = 1 if mode == "binary" else 4
    batches = []
    for n in (3, 1):
        logits = images(n, count, 7, seed=n)
        logits[:, 3:] = -9.0  # the last class never occurs
        target = labels(n, 7, 7, classes=2 if mode == "binary" else 3, seed=n)
        if mode == "multilabel":
            target = labels(n, count, 7, 7, classes=2, seed=n)
            target[:, 3] = 0
        target[..., 0, :] = IGNORED
        batches.append((logits, target))
    names = [f"c{label}" for label in range(count)]
    metric = SegmentationScores(count, mode, class_names=names)
    for logits, target in batches:
        metric.update(logits, target)
    logits = torch.cat([logits for logits, _ in batches]).numpy()
    target = torch.cat([target for _, target in batches]).numpy()
    if mode == "multiclass":
        valid = target != IGNORED
        predictions = [(logits.argmax(1) == c) & valid for c in range(count)]
        truths = [(target == c) & valid for c in range(count)]
        right = (logits.argmax(1) == target)[valid].mean()
    else:
        target = target.reshape(logits.shape)
        valid = target != IGNORED
        predictions = [((logits > 0) & valid)[:, c] for c in range(count)]
        truths = [(target == 1)[:, c] for c in range(count)]
        right = ((logits > 0) == (target == 1))[valid].mean()
    expected = scores_by_hand(predictions, truths)
    values = {name: value.item() for name, value in metric.compute().items()}
    assert set(values) == {
        "miou",
        "mdice",
        "pixel_acc",
        *(f"{kind}/c{c}" for c in expected for kind in ("iou", "dice")),
    }
    assert len(expected) == max(1, count - 1)
    for label, (iou, dice) in expected.items():
        assert values[f"iou/c{label}"] == pytest.approx(iou, rel=1e-6)
        assert values[f"dice/c{label}"] == pytest.approx(dice, rel=1e-6)
    assert values["miou"] == pytest.approx(np.mean([iou for iou, _ in expected.values()]), rel=1e-6)
    assert values["mdice"] == pytest.approx(np.mean([dice for _, dice in expected.values()]), rel=1e-6)
    assert values["pixel_acc"] == pytest.approx(right, rel=1e-6)


def test_scores_of_classes_in_the_log():
    task = SegmentationTask(nn.Identity(), 3, per_class=True, class_names=["sky", "road", "car"])
    plain = SegmentationTask(nn.Identity(), 3)
    x, mask = images(2, 3, 8), masks(2, 8, classes=2)
    x[:, 2] = -9.0
    found = {}
    for module in (task, plain):
        run = trainer()
        run.validate(module, loader([(x, mask)]), verbose=False)
        found[module] = {name: value.item() for name, value in run.callback_metrics.items()}
    assert {name for name in found[task] if "/" in name} == {
        "val_iou/sky", "val_iou/road", "val_dice/sky", "val_dice/road",
    }  # fmt: skip
    assert found[task]["val_miou"] == pytest.approx(found[plain]["val_miou"], rel=1e-6)
    assert found[task]["val_pixel_acc"] == pytest.approx(found[plain]["val_pixel_acc"], rel=1e-6)
    assert list(task.state_dict()) == []


def test_an_ignored_class_among_the_classes_has_no_score():
    """The mean is equal with and without scores by class."""
    x, mask = images(2, 3, 8), labels(2, 8, 8, classes=3)
    found = []
    for per_class in (False, True):
        run = trainer()
        task = SegmentationTask(nn.Identity(), 3, ignore_index=0, per_class=per_class)
        run.validate(task, loader([(x, mask)]), verbose=False)
        found.append({name: value.item() for name, value in run.callback_metrics.items()})
    assert found[1]["val_miou"] == pytest.approx(found[0]["val_miou"], rel=1e-6)
    assert found[1]["val_pixel_acc"] == pytest.approx(found[0]["val_pixel_acc"], rel=1e-6)
    assert "val_iou/0" not in found[1]


@pytest.mark.parametrize(("label", "names"), [(0, {"pixel_acc"}), (IGNORED, set())])
def test_where_nothing_is_to_be_found_there_is_no_score(label, names):
    """A client without true and predicted lesions is not the worst client."""
    metric = SegmentationScores(1, "binary")
    metric.update(torch.full((2, 1, 4, 4), -1.0), torch.full((2, 4, 4), label))
    assert set(metric.compute()) == names
    metric.update(torch.full((1, 1, 4, 4), 1.0), torch.full((1, 4, 4), 0))
    assert metric.compute()["miou"] == 0


@pytest.mark.parametrize("mode", ["binary", "multilabel"])
def test_masks_of_0_and_255(mode):
    shape = (2, 4, 4) if mode == "binary" else (2, 3, 4, 4)
    mask = 255 * labels(*shape, classes=2)
    logits = images(2, 1 if mode == "binary" else 3, 4)
    with pytest.raises(ValueError, match=f"masks of 0 and 1, .*mode='{mode}', but got 255"):
        SegmentationScores(logits.shape[1], mode, ignore_index=None).update(logits, mask)


def test_a_binary_class_that_is_ignored(recwarn):
    """Masks with 0 and 255, and 255 as the ignored index, are a mistake; ignored pixels next to the class are valid."""
    mask = labels(2, 8, 8, classes=2)
    task = SegmentationTask(nn.Identity(), 1, mode="binary")
    for values, count in ((255 * mask, 1), (mask, 0), (torch.where(images(2, 1, 8)[:, 0] > 1, 255, mask), 0)):
        recwarn.clear()
        trainer().validate(task, loader([(images(2, 1, 8), values)]), verbose=False)
        assert (
            sum(
                "No pixel in a batch's masks is 1, but some pixels have the ignored label 255" in str(w.message)
                for w in recwarn
            )
            == count
        )


def test_binary_masks_are_checked_in_training(recwarn):
    """Training checks masks because validation data may be missing."""
    mask = 255 * labels(2, 8, 8, classes=2)
    data = loader([(images(2, 1, 8), mask)])
    trainer(max_epochs=1).fit(SegmentationTask(nn.Conv2d(1, 1, 1), 1, mode="binary"), data)
    assert any(
        "No pixel in a batch's masks is 1, but some pixels have the ignored label 255" in str(w.message)
        for w in recwarn
    )
    with pytest.raises(ValueError, match=r"masks of 0 and 1, .* mode='binary', but got 255: convert .* `mask > 0`"):
        trainer(max_epochs=1).fit(SegmentationTask(nn.Conv2d(1, 1, 1), 1, mode="binary", ignore_index=None), data)


# --- Tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "tile"), [((37, 50), (16, 20)), ((16, 20), (16, 20)), ((9, 40), (16, 16))])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.6])
def test_tiles_of_what_looks_at_one_pixel_are_the_whole(side, tile, overlap):
    network, sizes = nn.Conv2d(3, 2, 1), set()

    def noting(x):
        sizes.add(tuple(x.shape))
        return network(x)

    x = images(2, 3, 50)[..., : side[0], : side[1]]
    assert torch.allclose(tiled_logits(noting, x, tile, overlap), network(x), atol=1e-6)
    assert sizes == {(2, 3, *tile)}


def test_there_are_no_seams():
    """A network with border effects differs strongly at edges of adjacent tiles, but not with blended tiles."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 1, 5, padding=2)).eval()
    x = torch.ones(1, 1, 64, 64)
    with torch.no_grad():
        inside = network(x)[0, 0, 32, 32]
        seams = (tiled_logits(network, x, (16, 16), 0.0)[0, 0, 8:-8, 8:-8] - inside).abs().max()
        blended = (tiled_logits(network, x, (16, 16), 0.6)[0, 0, 8:-8, 8:-8] - inside).abs()
        steps = tiled_logits(network, x, (16, 16), 0.6)[0, 0, 8:-8, 8:-8].diff().abs().max()
        hard = tiled_logits(network, x, (16, 16), 0.0)[0, 0, 8:-8, 8:-8].diff().abs().max()
    assert blended.mean() < 0.2 * seams
    assert steps < 0.35 * hard


def test_one_tile_passes_into_the_next_in_equal_steps():
    numbers = iter((0.0, 1.0))
    logits = tiled_logits(lambda tile: torch.full_like(tile, next(numbers)), torch.zeros(1, 1, 4, 12), (4, 8), 0.5)
    expected = torch.tensor([0.0] * 4 + [0.2, 0.4, 0.6, 0.8] + [1.0] * 4)
    torch.testing.assert_close(logits, expected.expand(1, 1, 4, 12))


def test_prediction_by_tiles():
    torch.manual_seed(0)
    network = nn.Conv2d(3, 4, 1)
    whole, tiled = (SegmentationTask(network, 4, tile=tile) for tile in (None, (16, 16)))
    x = images(1, 3, 41)
    assert torch.equal(*(trainer().predict(task, loader([x]))[0] for task in (whole, tiled)))
    with pytest.raises(ValueError, match=r"logits of 16 x 16 pixels, but got \(1, 4, 8, 8\)"):
        trainer().predict(SegmentationTask(nn.AvgPool2d(2), 4, tile=(16, 16)), loader([images(1, 4, 41)]))


# --- Pretrained encoders ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained():
    """An encoder with distinctive weights."""
    torch.manual_seed(7)
    return smp.Unet("tu-resnet10t", encoder_weights=None, encoder_depth=3, decoder_channels=(8, 8, 8)).encoder


@pytest.mark.parametrize(("names", "ending"), [("timm", "safetensors"), ("smp", "ckpt"), ("task", "safetensors")])
def test_weights_of_an_encoder_from_a_file(names, ending, pretrained, tmp_path, caplog):
    state = {
        "timm": {name.removeprefix("model."): value for name, value in pretrained.state_dict().items()},
        "smp": pretrained.state_dict(),
        "task": {f"model.encoder.{name}": value for name, value in pretrained.state_dict().items()},
    }[names]
    state = {name: value.clone() for name, value in state.items() if not name.endswith("num_batches_tracked")}
    if names == "timm":
        state |= {"fc.weight": torch.zeros(10, 8), "fc.bias": torch.zeros(10)}  # a classifier
    path = tmp_path / f"weights.{ending}"
    if ending == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3}, path)
    kwargs = {"encoder_depth": 3, "decoder_channels": (8, 8, 8)}
    with caplog.at_level(logging.INFO, "lightning_fed"):
        task = SegmentationTask("Unet", 3, encoder_name="tu-resnet10t", encoder_weights=str(path), model_kwargs=kwargs)
    for name, value in pretrained.state_dict().items():
        assert torch.equal(task.model.encoder.state_dict()[name], value), name
    assert ("do not belong to the encoder: " in caplog.text) == (names == "timm")


def test_files_that_do_not_serve(pretrained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"published weights or a file, but .*none\.pt does not exist"):
        SegmentationTask("Unet", 3, encoder_weights=str(tmp_path / "none.pt"))
    state = pretrained.state_dict()
    first = next(name for name in state if name.endswith("conv1.0.weight"))
    torch.save({name: value for name, value in state.items() if name != first}, tmp_path / "less.pt")
    with pytest.raises(ValueError, match=r"but 1 are missing \(model\.conv1\.0\.weight"):
        load_encoder_weights(copy.deepcopy(pretrained), tmp_path / "less.pt")
    torch.save({**state, first: state[first][:, :1]}, tmp_path / "grey.pt")
    with pytest.raises(ValueError, match=r"entry 'model\.conv1\.0\.weight' of grey\.pt .* another number of channels"):
        load_encoder_weights(copy.deepcopy(pretrained), tmp_path / "grey.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"The file has entries named a, .*: the file may belong to another encoder"):
        load_encoder_weights(copy.deepcopy(pretrained), tmp_path / "other.pt")


def test_without_a_network(monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(smp, "create_model", offline)
    with pytest.raises(OptionError, match=r"'imagenet' of the encoder 'resnet18' could not be downloaded .*PATH"):
        SegmentationTask("Unet", 3, encoder_weights="imagenet")
    with pytest.raises(ConnectionError):
        SegmentationTask("Unet", 3)


def test_by_clients(federated_trainer):
    from lightning_fed import FederatedDataModule
    from tests import models

    clients = models.scenes({"a": 3, "b": 3})
    clients["b"][1][:] = clients["b"][1].clamp(max=1)
    task = SegmentationTask(nn.Conv2d(3, 3, 3, padding=1), 3, per_class=True)
    with torch.no_grad():
        task.model.bias.copy_(torch.tensor([9.0, 0.0, -99.0]))
    trainer = federated_trainer(max_rounds=1)
    loaders = {name: [tensors] for name, tensors in clients.items()}
    trainer.fit(task, datamodule=FederatedDataModule(models.as_datasets(clients), loaders))
    logged = {name for name in trainer.callback_metrics if name.startswith("client/")}
    assert "client/a/val_iou/2" in logged
    assert "client/b/val_iou/2" not in logged
    assert isinstance(trainer, L.Trainer)
