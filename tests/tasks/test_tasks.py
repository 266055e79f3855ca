"""The ready tasks against explicit plain PyTorch and numpy."""

import copy
import itertools
import json
import textwrap

import lightning as L
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.callbacks import SampledSoftmax
from lightning_fed.modules import find_classifier, find_sampled_softmax_head
from lightning_fed.tasks.base import Task
from lightning_fed.tasks.classification import ClassificationTask
from lightning_fed.tasks.segmentation import SegmentationTask
from tests.breadth import quick
from tests.recorders import loading

IGNORED = 255


def trainer(**kwargs):
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", **{**off, "max_epochs": 1, "num_sanity_val_steps": 0, **kwargs})


def loader(batches):
    return DataLoader(batches, batch_size=None)


def fit(task, batches, **kwargs):
    """Trains on the batches, and validates on the first batch, because tasks expect validation."""
    run = trainer(**kwargs)
    run.fit(task, loader(batches), loader(batches[:1]))
    return run


def images(n, channels=1, size=28, seed=0):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def labels(*shape, classes=10, seed=0):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def masks(n, size=32, classes=3, seed=0):
    mask = labels(n, size, size, classes=classes, seed=seed)
    mask[:, :4] = IGNORED
    return mask


def assert_same_weights(model, expected):
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []


# --- Training steps ---------------------------------------------------------------------------------------------------

CLASSIFICATION_STEPS = {
    "defaults": ({}, lambda p: torch.optim.SGD(p, lr=0.01), F.cross_entropy),
    "sgd": (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "optimizer_kwargs": {"nesterov": True}},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
        F.cross_entropy,
    ),
    "adamw": (
        {"optimizer": "AdamW", "lr": 1e-3, "optimizer_kwargs": {"betas": [0.8, 0.9]}},
        lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.9)),
        F.cross_entropy,
    ),
    "loss": (
        {"lr": 0.1, "label_smoothing": 0.1, "class_weights": [1.0, 2.0, *[0.5] * 8]},
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda x, y: F.cross_entropy(x, y, torch.tensor([1.0, 2.0, *[0.5] * 8]), label_smoothing=0.1),
    ),
}


@pytest.mark.parametrize(
    ("as_dict", "row"),
    quick(
        itertools.product([False, True], sorted(CLASSIFICATION_STEPS)),
        [(False, "defaults"), (False, "loss"), (True, "adamw"), (True, "sgd")],
    ),
)
def test_classification_steps_equal_plain_pytorch(row, as_dict):
    options, make_optimizer, loss_function = CLASSIFICATION_STEPS[row]
    task = ClassificationTask("lenet", num_classes=10, **options)
    plain = copy.deepcopy(task.model)
    pairs = [(images(n, seed=n), labels(n, seed=n)) for n in (6, 3)]
    batches = [{"image": x, "label": y} for x, y in pairs] if as_dict else pairs
    run = fit(task, batches)

    optimizer, losses = make_optimizer(plain.parameters()), []
    for x, y in pairs:
        loss = loss_function(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_weights(task.model, plain)
    # the mean over all examples of the epoch, for any batch sizes
    assert run.callback_metrics["train_loss"].item() == pytest.approx((6 * losses[0] + 3 * losses[1]) / 9, rel=1e-6)
    assert set(run.callback_metrics) == {"train_loss", "val_loss", "val_acc"}


def dice_by_hand(logits, mask):
    """Mean over classes of 1 - 2 sum(p t) / sum(p + t), without ignored pixels; 0 for an absent class."""
    p, valid = logits.softmax(1), mask != IGNORED
    terms = []
    for c in range(logits.shape[1]):
        truth = (mask == c)[valid].float()
        p_c = p[:, c][valid]
        terms.append((1 - 2 * (p_c * truth).sum() / (p_c.sum() + truth.sum())) * bool(truth.any()))
    return torch.stack(terms).mean()


def cross_entropy_by_hand(logits, mask, weight=None):
    return F.cross_entropy(logits, mask, weight, ignore_index=IGNORED)


def test_segmentation_steps_equal_plain_pytorch():
    """A real smp network with BatchNorm: weights and running statistics after two steps, bit for bit."""
    torch.manual_seed(0)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "class_weights": [0.5, 1.0, 2.0]}
    task = SegmentationTask("DeepLabV3Plus", num_classes=3, encoder_name="resnet18", **options)
    plain = copy.deepcopy(task.model)
    assert isinstance(plain, smp.DeepLabV3Plus)
    batches = [(images(n, 3, 32, seed=n), masks(n, seed=n)) for n in (3, 2)]

    class SeedDropout(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            torch.manual_seed(batch_idx)

    fit(task, batches, callbacks=[SeedDropout()])

    optimizer = torch.optim.SGD(plain.train().parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for batch_idx, (x, mask) in enumerate(batches):
        torch.manual_seed(batch_idx)
        loss = cross_entropy_by_hand(plain(x), mask, torch.tensor([0.5, 1.0, 2.0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same_weights(task.model, plain)


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        ("ce", cross_entropy_by_hand),
        ("dice", dice_by_hand),
        ("ce+dice", lambda x, y: cross_entropy_by_hand(x, y) + dice_by_hand(x, y)),
    ],
)
def test_segmentation_losses(loss, by_hand):
    task = SegmentationTask(nn.Identity(), num_classes=4, loss=loss)
    logits, mask = images(2, 4, 8).double().requires_grad_(), masks(2, 8, classes=3)  # class 3 does not occur
    value, expected = task.compute_loss(logits, mask), by_hand(logits, mask)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient, expected_gradient = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (value, expected))
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
    assert not gradient[:, :, :4].any()  # ignored pixels have no gradient


@pytest.mark.parametrize("loss", ["ce", "dice", "ce+dice"])
def test_a_batch_without_labels_has_loss_zero_and_no_gradient(loss):
    task = SegmentationTask(nn.Conv2d(3, 3, 1), num_classes=3, loss=loss, lr=1.0)
    before = copy.deepcopy(task.model)
    batch = (images(2, 3, 8), torch.full((2, 8, 8), IGNORED))
    run = trainer()
    run.fit(task, loader([batch]), loader([batch, (images(1, 3, 8), masks(1, 8))]))
    assert run.callback_metrics["train_loss"] == 0
    assert_same_weights(task.model, before)
    assert run.callback_metrics["val_loss"] > 0  # not NaN


def test_a_loss_that_is_nan_is_not_hidden():
    task = SegmentationTask(nn.Identity(), num_classes=3)
    logits = images(1, 3, 8)
    logits[0, 0, 7, 7] = torch.nan
    assert task.compute_loss(logits, masks(1, 8)).isnan()


def test_masks_may_have_a_channel_and_any_integer_type():
    task = SegmentationTask(nn.Identity(), num_classes=3)
    x, mask = images(2, 3, 8), masks(2, 8)
    for labels in (mask[:, None], mask.to(torch.uint8), mask.int()[:, None]):
        for batch in ((x, labels), [x, labels], {"image": x, "mask": labels}):
            result = task.split_batch(batch)
            assert result[0] is x
            assert torch.equal(result[1], mask)
            assert result[1].dtype == torch.int64
    labelled = ClassificationTask(nn.Identity(), num_classes=3)
    assert torch.equal(
        labelled.compute_loss(x[..., 0, 0], torch.tensor([2, 0], dtype=torch.int32)),
        F.cross_entropy(x[..., 0, 0], torch.tensor([2, 0])),
    )


def test_without_an_ignored_class_every_pixel_counts():
    task = SegmentationTask(nn.Identity(), num_classes=3, ignore_index=None, loss="ce+dice")
    x, mask = images(2, 3, 8), labels(2, 8, 8, classes=3)
    expected = F.cross_entropy(x, mask) + dice_by_hand(x, mask)
    assert task.compute_loss(x, mask).item() == pytest.approx(expected.item(), rel=1e-6)
    assert task.ignore_index is None


# --- Metrics ----------------------------------------------------------------------------------------------------------


def miou_by_hand(logits, targets, num_classes, ignored):
    """Intersection over union from pixel sets of the whole epoch, mean over classes in truth or prediction."""
    truth = np.concatenate([target.numpy().ravel() for target in targets])
    prediction = np.concatenate([logit.numpy().argmax(1).ravel() for logit in logits])
    truth, prediction = truth[truth != ignored], prediction[truth != ignored]
    ious = []
    for c in range(num_classes):
        union = ((truth == c) | (prediction == c)).sum()
        if union and c != ignored:
            ious.append(((truth == c) & (prediction == c)).sum() / union)
    return np.mean(ious), (truth == prediction).mean()


def segmentation_batches(ignored):
    """Class 3 only occurs in the truth, class 4 in the prediction, class 5 in neither; sizes differ."""
    batches = []
    for n in (3, 1, 2):
        target, logits = labels(n, 9, 9, classes=4, seed=n), images(n, 6, 9, seed=n)
        logits[:, 3] = logits[:, 5] = -9.0
        logits[:, 4] -= 1.0
        target[:, :2] = ignored
        batches.append((logits, target))
    batches[1][1][:] = ignored  # a batch without labels
    return batches


@pytest.mark.parametrize("ignored", [IGNORED, 0, -1])
@pytest.mark.parametrize("stage", ["val", "test"])
def test_segmentation_metrics_equal_numpy(stage, ignored):
    batches = segmentation_batches(ignored)
    task = SegmentationTask(nn.Identity(), num_classes=6, ignore_index=ignored)
    run = trainer()
    for _ in range(2):  # the second run starts anew
        (run.validate if stage == "val" else run.test)(task, loader(batches), verbose=False)
        miou, accuracy = miou_by_hand(*zip(*batches, strict=True), 6, ignored)
        assert run.callback_metrics[f"{stage}_miou"].item() == pytest.approx(miou, rel=1e-6)
        assert run.callback_metrics[f"{stage}_pixel_acc"].item() == pytest.approx(accuracy, rel=1e-6)
        losses = [F.cross_entropy(x, y, ignore_index=ignored) if (y != ignored).any() else 0 for x, y in batches]
        mean = (3 * losses[0] + 1 * losses[1] + 2 * losses[2]) / 6
        assert run.callback_metrics[f"{stage}_loss"].item() == pytest.approx(mean.item(), rel=1e-6)
        assert set(run.callback_metrics) == {f"{stage}_{name}" for name in ("loss", "miou", "mdice", "pixel_acc")}


@pytest.mark.parametrize("stage", ["val", "test"])
def test_accuracy_counts_examples(stage):
    batches = [(images(n, 5, 1, seed=n), labels(n, classes=5, seed=n + 1)) for n in (7, 2, 4)]
    task = ClassificationTask(nn.Flatten(), num_classes=5)
    run = trainer()
    (run.validate if stage == "val" else run.test)(task, loader(batches), verbose=False)
    right = sum((x.flatten(1).argmax(1) == y).sum().item() for x, y in batches)
    assert 0 < right < 13
    assert run.callback_metrics[f"{stage}_acc"].item() == pytest.approx(right / 13, rel=1e-6)
    assert set(run.callback_metrics) == {f"{stage}_loss", f"{stage}_acc"}


def test_validation_in_a_fit_starts_afresh_each_epoch_and_after_the_sanity_check():
    """With lr=0 the network is constant, so each epoch must log the same value."""
    batches = [(images(4, 1, 28, seed=n), labels(4, seed=n)) for n in range(3)]
    task = ClassificationTask("mlp", num_classes=10, lr=0.0)
    with torch.no_grad():
        expected = np.mean([(task(x).argmax(1) == y).float().mean().item() for x, y in batches])

    class Record(L.Callback):
        values = ()

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.values += (trainer.callback_metrics["val_acc"].item(),)

    record = Record()
    trainer(max_epochs=3, num_sanity_val_steps=1, callbacks=[record]).fit(task, loader(batches[:1]), loader(batches))
    assert 0 < expected < 1
    assert record.values == pytest.approx([expected] * 3)


def test_each_validation_loader_has_its_own_metrics():
    groups = [[(images(n, 5, 1, seed=n), labels(n, classes=5, seed=n)) for n in sizes] for sizes in ((7, 2), (11,))]
    task = ClassificationTask(nn.Flatten(), num_classes=5)
    run = trainer()
    run.validate(task, [loader(group) for group in groups], verbose=False)
    expected = {}
    for index, group in enumerate(groups):
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        expected[f"val_acc/dataloader_idx_{index}"] = (x.flatten(1).argmax(1) == y).float().mean().item()
        expected[f"val_loss/dataloader_idx_{index}"] = F.cross_entropy(x.flatten(1), y).item()
    assert {key: value.item() for key, value in run.callback_metrics.items()} == pytest.approx(expected)
    assert len(set(expected.values())) == 4
    # a single loader again: no suffix, and no state of the second loader
    run.validate(task, loader(groups[1]), verbose=False)
    assert set(run.callback_metrics) == {"val_loss", "val_acc"}
    assert run.callback_metrics["val_acc"].item() == pytest.approx(expected["val_acc/dataloader_idx_1"])


def test_predictions():
    logits = images(3, 4, 6)
    segmentation = SegmentationTask(nn.Identity(), num_classes=4)
    flat = ClassificationTask(nn.Flatten(), num_classes=4 * 36)
    for batch in (logits, (logits, None), {"image": logits}):
        (classes,) = trainer().predict(segmentation, loader([batch]))
        assert np.array_equal(classes.numpy(), logits.numpy().argmax(1))
        (probabilities,) = trainer().predict(flat, loader([batch]))
        exponentials = np.exp(logits.flatten(1).numpy())
        np.testing.assert_allclose(probabilities, exponentials / exponentials.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "batch", "message"),
    [
        (ClassificationTask, torch.zeros(2, 5), "'image' and 'label', but got Tensor"),
        (ClassificationTask, (torch.zeros(2, 5),) * 3, "but got a tuple with 3 elements"),
        (
            SegmentationTask,
            {"image": 1, "label": 2},
            r"'image' and 'mask', but got a dict with keys \['image', 'label'\]",
        ),
    ],
)
def test_other_batches_are_refused(task, batch, message):
    with pytest.raises(TypeError, match=message):
        task(nn.Identity(), num_classes=5).training_step(batch, 0)


# --- Optimizer and schedule -------------------------------------------------------------------------------------------


class Rates(L.Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.8] * 6),
        ({"scheduler": "ExponentialLR", "scheduler_kwargs": {"gamma": 0.5}}, [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]),
        (
            {"scheduler": "MultiStepLR", "scheduler_kwargs": {"milestones": [1], "gamma": 0.25}},
            [0.8, 0.8, 0.2, 0.2, 0.2, 0.2],
        ),
        (  # the monitored value never falls below 0, so the rate drops after two epochs
            {
                "scheduler": "ReduceLROnPlateau",
                "scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1e9, "threshold_mode": "abs"},
            },
            [0.8, 0.8, 0.8, 0.8, 0.4, 0.4],
        ),
    ],
)
def test_schedules_reach_the_optimizer(options, expected):
    task = ClassificationTask("mlp", num_classes=10, lr=0.8, **options)
    rates = Rates()
    fit(task, [(images(2, seed=n), labels(2, seed=n)) for n in range(2)], max_epochs=3, callbacks=[rates])
    assert rates.seen == pytest.approx(expected)


def test_optimizer_options_reach_the_optimizer():
    task = SegmentationTask(
        nn.Conv2d(3, 3, 1),
        num_classes=3,
        optimizer="RMSprop",
        lr=0.3,
        momentum=0.7,
        weight_decay=0.2,
        optimizer_kwargs={"alpha": 0.6, "centered": True},
    )
    optimizer = task.configure_optimizers()
    assert type(optimizer) is torch.optim.RMSprop
    (group,) = optimizer.param_groups
    wanted = {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.2, "alpha": 0.6, "centered": True}
    assert {key: group[key] for key in wanted} == wanted
    assert [id(p) for p in group["params"]] == [id(p) for p in task.parameters()]
    # without an option the optimizer's default applies
    (group,) = ClassificationTask("mlp", 10, optimizer="AdamW").configure_optimizers().param_groups
    assert group["weight_decay"] == 0.01
    # written by Lightning's learning-rate finder
    task.lr = 0.9
    assert task.configure_optimizers().param_groups[0]["lr"] == 0.9


# --- Construction -----------------------------------------------------------------------------------------------------


def test_the_state_is_the_networks_state():
    """A client sends the network without metrics and class weights."""
    network = smp.Unet("resnet18", encoder_weights=None, classes=3)
    task = SegmentationTask(network, num_classes=3, class_weights=[1.0, 2.0, 3.0], loss="ce+dice")
    assert list(task.state_dict()) == [f"model.{name}" for name in network.state_dict()]
    assert task.model is network
    assert (task.num_classes, task.ignore_index) == (3, 255)


@pytest.mark.parametrize("name", quick(["Unet", "DeepLabV3Plus", "fpn"], ["fpn"]))
def test_smp_networks_by_name(name):
    torch.manual_seed(0)
    task = SegmentationTask(
        name, num_classes=5, encoder_name="mobilenet_v2", in_channels=4, model_kwargs={"encoder_depth": 5}
    )
    torch.manual_seed(0)
    options = {"encoder_name": "mobilenet_v2", "encoder_weights": None, "in_channels": 4, "classes": 5}
    assert_same_weights(task.model, smp.create_model(name, **options))
    assert task(images(2, 4, 64)).shape == (2, 5, 64, 64)


@pytest.mark.parametrize("model", ["resnet18", nn.Sequential(nn.BatchNorm2d(8), nn.Flatten())])
def test_norm_group_leaves_no_batch_norm(model):
    task = ClassificationTask(model, num_classes=8, norm="group")
    kinds = {type(module) for module in task.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds


def test_norm_group_leaves_no_batch_norm_for_segmentation():
    for norm in ("batch", "group"):
        names = SegmentationTask("Unet", 2, encoder_name="resnet18", norm=norm).state_dict()
        assert any("running" in name for name in names) == (norm == "batch")


def test_checkpoints_load_safely_and_rebuild_the_task(tmp_path):
    task = ClassificationTask("mlp", 10, lr=0.3, model_kwargs={"hidden": [16]}, class_weights=[0.5] * 10)
    segmentation = SegmentationTask(nn.Conv2d(3, 3, 1), num_classes=3, loss="dice", ignore_index=7)
    batches = {task: (images(2), labels(2)), segmentation: (images(2, 3, 8), labels(2, 8, 8, classes=3))}
    for module, batch in batches.items():
        fit(module, [batch]).save_checkpoint(tmp_path / f"{module.num_classes}.ckpt")
    loaded = ClassificationTask.load_from_checkpoint(tmp_path / "10.ckpt", **loading(weights_only=True))
    assert_same_weights(loaded, task)
    assert loaded.hparams == task.hparams
    assert (loaded.lr, loaded.class_weights.tolist()) == (0.3, [0.5] * 10)
    # a given module is not a hyperparameter, and must be passed again
    loaded = SegmentationTask.load_from_checkpoint(
        tmp_path / "3.ckpt", model=nn.Conv2d(3, 3, 1), **loading(weights_only=True)
    )
    assert_same_weights(loaded, segmentation)
    assert "model" not in segmentation.hparams
    assert (loaded.ignore_index, loaded.hparams["loss"]) == (7, "dice")


# LightningCLI 2.6 uses `add_instantiator`, deprecated in jsonargparse 4.53
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_everything_can_be_said_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-fed"])  # the CLI warns about pytest's arguments
    (tmp_path / "recipe.yaml").write_text(
        textwrap.dedent(
            """
            trainer: {accelerator: cpu, logger: false}
            model:
              class_path: lightning_fed.tasks.segmentation.SegmentationTask
              init_args:
                model: Unet
                num_classes: 4
                encoder_name: mobilenet_v2
                model_kwargs: {decoder_channels: [32, 16, 16, 8, 8]}
                norm: group
                loss: ce+dice
                class_weights: [1, 2, 3, 4]
                optimizer: AdamW
                lr: 1e-3
                weight_decay: 0.05
                optimizer_kwargs: {betas: [0.9, 0.95]}
                scheduler: CosineAnnealingLR
                scheduler_kwargs: {T_max: 40}
            """
        )
    )
    arguments = ["--config", str(tmp_path / "recipe.yaml")]
    options = {
        "subclass_mode_model": True,
        "run": False,
        "save_config_callback": None,
        "seed_everything_default": False,
    }
    task = LightningCLI(Task, args=arguments, **options).model
    assert isinstance(task, SegmentationTask)
    assert task.model.decoder.blocks[-1].conv1[0].out_channels == 8
    assert task.class_weights.tolist() == [1, 2, 3, 4]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in task.modules())
    configured = task.configure_optimizers()
    (group,) = configured["optimizer"].param_groups
    assert type(configured["optimizer"]) is torch.optim.AdamW
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (1e-3, 0.05, (0.9, 0.95))
    assert type(configured["lr_scheduler"]["scheduler"]) is torch.optim.lr_scheduler.CosineAnnealingLR
    assert configured["lr_scheduler"]["scheduler"].T_max == 40

    own = {"class_path": "segmentation_models_pytorch.losses.TverskyLoss", "init_args": {"mode": "multiclass"}}
    loss = f"--model.init_args.loss={json.dumps(own)}"
    task = LightningCLI(Task, args=[*arguments, loss], **options).model
    logits, mask = images(2, 4, 8), labels(2, 8, 8, classes=4)
    assert task.compute_loss(logits, mask) == smp.losses.TverskyLoss("multiclass")(logits, mask)
    with pytest.raises(SystemExit):  # invalid choices are refused by type
        LightningCLI(Task, args=[*arguments, "--model.init_args.norm=layer"], **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SegmentationTask("Unet", 3, loss="x"),
            "Expected `loss` to be a function or a sum of 'ce', 'dice', .* but got 'x'",
        ),
        (lambda: SegmentationTask("Unet", 1), "`num_classes` to be at least 2 .*, but got 1"),
        (lambda: SegmentationTask("Vnet", 3), "got 'Vnet' and 'resnet18'.*'unet'"),
        (lambda: SegmentationTask("Unet", 3, encoder_name="resnet17"), "got 'Unet' and 'resnet17'.*'resnet18'"),
        (lambda: SegmentationTask("Unet", 3, model_kwargs={"aux_params": {"classes": 2}}), "without 'aux_params'"),
        (lambda: SegmentationTask("Unet", 3, class_weights=[1.0]), "`class_weights` to hold 3 weights.* but got 1"),
        (lambda: ClassificationTask("resnet17x", 10), "one of .*'mcmahan_cnn'.* or a timm model"),
        (lambda: ClassificationTask("mlp", 1), "`num_classes` to be at least 2, but got 1"),
        (
            lambda: ClassificationTask("mlp", 10, label_smoothing=1.5),
            "`label_smoothing` to be between 0 and 1, but got 1.5",
        ),
        (
            lambda: ClassificationTask("mlp", 10, norm="layer"),
            r"`norm` to be one of \['batch', 'group'\], but got 'layer'",
        ),
        (
            lambda: ClassificationTask("mlp", 10, optimizer="sgd"),
            r"`optimizer` to be one of \[.*'SGD'.*\], but got 'sgd'",
        ),
        (lambda: ClassificationTask("mlp", 10, optimizer="Optimizer"), "`optimizer` to be one of"),
        (
            lambda: ClassificationTask("mlp", 10, optimizer="Adam", momentum=0.9),
            "'Adam'.*unexpected keyword.*'momentum'",
        ),
        (lambda: ClassificationTask("mlp", 10, lr=-0.1), "Invalid learning rate: -0.1"),
        (lambda: ClassificationTask("mlp", 10, scheduler="Cosine"), r"`scheduler` to be one of \[.*'StepLR'.*'Cosine'"),
        (lambda: ClassificationTask("mlp", 10, scheduler="StepLR"), "the scheduler 'StepLR', .*'step_size'"),
        (
            lambda: ClassificationTask("mlp", 10, scheduler_kwargs={"gamma": 1}),
            "`scheduler` to be given.* but got None",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_construction_draws_no_random_numbers_beyond_the_networks():
    torch.manual_seed(5)
    task = ClassificationTask("lenet", 10, scheduler="StepLR", scheduler_kwargs={"step_size": 1})
    after = torch.rand(1)
    torch.manual_seed(5)
    expected = ClassificationTask("lenet", 10).model
    assert torch.equal(torch.rand(1), after)
    assert_same_weights(task.model, expected)


def test_a_head_of_very_many_classes():
    """The last layer becomes a sampled-softmax head with its own weight, found by the callback."""
    task = ClassificationTask("mcmahan_cnn", num_classes=500, head="sampled_softmax")
    name = find_sampled_softmax_head(task)
    head = task.get_submodule(name)
    assert name == f"model.{find_classifier(ClassificationTask('mcmahan_cnn', num_classes=500).model)}"
    assert (head.in_features, head.num_classes) == (512, 500)
    generator = torch.Generator().manual_seed(0)
    data = {
        client: TensorDataset(torch.randn(6, 1, 28, 28, generator=generator), torch.tensor([client, client + 9] * 3))
        for client in range(3)
    }
    before = head.weight.detach().clone()
    trainer = FederatedTrainer(
        max_rounds=1,
        callbacks=[SampledSoftmax(4)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(task, datamodule=FederatedDataModule(data, val=data))
    assert trainer.callback_metrics["clients/sampled_classes"] == 6
    assert 6 <= int((head.weight != before).any(1).sum()) <= 18
    assert "val_acc" in trainer.callback_metrics


def test_the_heads_own_arguments():
    tasks = [
        ClassificationTask("mcmahan_cnn", num_classes=50, head="sampled_softmax", head_kwargs=options)
        for options in (None, {"scale": 5.0}, {"normalize": False})
    ]
    heads = [task.get_submodule(find_sampled_softmax_head(task)) for task in tasks]
    assert [(head.scale, head.normalize) for head in heads] == [(20.0, True), (5.0, True), (20.0, False)]
    assert tasks[1].hparams["head_kwargs"] == {"scale": 5.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_kwargs": {"scale": 5.0}}, r"`head_kwargs` accepted by head='linear', but got \['scale'\]"),
        ({"head": "sampled_softmax", "head_kwargs": {"bias": True}}, r"accepted by head=.*, but got \['bias'\]"),
        ({"head": "cosine"}, r"Expected `head` to be one of \['linear', 'sampled_softmax'\]"),
        ({"head": "sampled_softmax", "class_weights": [1.0] * 10}, "Expected no `class_weights`"),
    ],
)
def test_a_head_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ClassificationTask("mcmahan_cnn", num_classes=10, **options)
