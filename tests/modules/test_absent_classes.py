"""FedSeg's loss: by pixel, equality with cross-entropy, and classes missing at clients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed.modules import absent_class_loss
from lightning_fed.tasks import SegmentationTask

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def loss_reference(logits, target, unlabelled, classes):
    """Miao et al. 2023, pixel by pixel in plain Python."""
    total, count = 0.0, 0
    _, num_classes, height, width = logits.shape
    absent = [label for label in range(num_classes) if label not in classes]
    for image in range(len(logits)):
        for row in range(height):
            for column in range(width):
                exponents = [math.exp(float(value)) for value in logits[image, :, row, column]]
                label = int(target[image, row, column])
                if label != unlabelled:
                    mass = exponents[label]
                elif absent:
                    mass = sum(exponents[other] for other in absent)
                else:
                    continue
                total, count = total - math.log(mass / sum(exponents)), count + 1
    return total / max(1, count)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([0, 2, 255], None), ([0, 2, 255], [0, 2, 3]), ([0, 1, 2, 3, 255], None), ([1, 3], None), ([255], None)],
)
def test_pixel_by_pixel(labels, classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, 6, generator=generator)
    target = torch.tensor(labels)[torch.randint(len(labels), (2, 5, 6), generator=generator)]
    known = {label for label in labels if label != 255} if classes is None else set(classes)
    expected = loss_reference(logits, target, 255, known)
    assert absent_class_loss(logits, target, classes=classes).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 2, 255]])
def test_with_all_classes_it_is_cross_entropy(labels):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, 8, generator=generator, requires_grad=True)
    target = torch.tensor(labels)[torch.randint(len(labels), (2, 8, 8), generator=generator)]
    gradients = []
    for loss in (absent_class_loss(logits, target), F.cross_entropy(logits, target, ignore_index=255)):
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-8)


def test_half_precision():
    """The number of pixels exceeds the float16 range."""
    logits = torch.zeros(1, 4, 256, 256, dtype=torch.float16)
    loss = absent_class_loss(logits, torch.zeros(1, 256, 256, dtype=torch.int64))
    assert loss.item() == pytest.approx(math.log(4), rel=1e-4)


def test_nothing_that_counts():
    """The client has all classes, and no pixel has a label: loss 0, gradients 0."""
    logits = torch.randn(1, 2, 3, 3, requires_grad=True)
    loss = absent_class_loss(logits, torch.full((1, 3, 3), 255), classes=[0, 1])
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(("target", "classes"), [(3, None), (1, [0, 2]), (-1, None)])
def test_classes_that_cannot_be(target, classes):
    with pytest.raises(ValueError, match="Expected `target` to contain only"):
        absent_class_loss(torch.zeros(1, 3, 1, 1), torch.full((1, 1, 1), target), classes=classes)


def test_clients_that_lack_a_class_do_not_unlearn_it(federated_trainer):
    """One client labels class 1, the other class 2; other pixels are unlabelled, and class 0 has no labels.

    With cross-entropy no pixel supports class 0. With FedSeg's loss an unlabelled pixel has another class than labelled
    pixels, so both clients leave class 0.
    """
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(3, (32, 4, 4), generator=generator)
    images = F.one_hot(truth, 3).movedim(-1, 1).float() + 0.1 * torch.randn(32, 3, 4, 4, generator=generator)
    clients = {
        name: TensorDataset(images, torch.where(truth == label, truth, 255)) for name, label in (("a", 1), ("b", 2))
    }
    right, background = {}, {}
    for loss in ("ce", "fedseg"):
        network = nn.Conv2d(3, 3, 1)
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)
        task = SegmentationTask(network, num_classes=3, loss=loss, lr=1.0)
        federated_trainer(max_rounds=10).fit(task, clients)
        right[loss] = float((task(images).argmax(1) == truth)[truth > 0].float().mean())
        background[loss] = float((task(images).argmax(1) == 0)[truth == 0].float().mean())
    assert (right["fedseg"], background["fedseg"]) == (1.0, 1.0)
    assert background["ce"] < 0.5


def test_the_task_in_evaluation(federated_trainer):
    """Validation uses cross-entropy over the labelled pixels."""
    task = SegmentationTask(nn.Identity(), num_classes=3, loss="fedseg")
    logits, target = torch.randn(2, 3, 4, 4), torch.tensor([0, 255]).repeat(2, 4, 2)
    assert torch.equal(task.compute_loss(logits, target), absent_class_loss(logits, target))
    task.eval()
    assert torch.equal(task.compute_loss(logits, target), F.cross_entropy(logits, target, ignore_index=255))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ignore_index": None}, "an `ignore_index` for pixels without a label with loss='fedseg', but got"),
        ({"mode": "multilabel"}, "Expected mode='multiclass' .* but got 'multilabel'"),
        ({"class_weights": [1.0, 2.0, 1.0]}, "Expected no `class_weights` for loss='fedseg'"),
    ],
)
def test_options_that_do_not_go_with_it(options, words):
    with pytest.raises(ValueError, match=words):
        SegmentationTask(nn.Identity(), num_classes=3, loss="fedseg", **options)
