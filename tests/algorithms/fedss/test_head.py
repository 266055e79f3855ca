"""The sampled-softmax head: logits, and losses while holding some classes."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fed.algorithms.fedss import log_correction, sample_negatives, sampled_logits
from lightning_fed.modules import SampledClasses, SampledSoftmaxHead
from tests import references_sampled_softmax as references
from tests.breadth import pairs

N, D, BATCH = 12, 5, 7
POSITIVES, NEGATIVES = [2, 3, 9], [0, 4, 5, 11]
CLASSES = sorted(POSITIVES + NEGATIVES)
KINDS = {"cosine": {}, "cosine with bias": {"bias": True}, "linear": {"normalize": False, "bias": True}}
OBJECTIVES = ["fedss", "negonly", "posonly"]


def held(classes=CLASSES, positives=POSITIVES, **options):
    return SampledClasses(torch.tensor(classes), torch.tensor([c in positives for c in classes]), **options)


def put_rows(head, classes):
    for parameter in head.parameters():
        parameter.data = parameter.data[classes].clone()


def holding(kind="cosine", classes=CLASSES, positives=POSITIVES, **options):
    """A head with some classes, and the same head with all classes, in float64."""
    full = SampledSoftmaxHead(D, N, **KINDS[kind]).double()
    head = copy.deepcopy(full)
    put_rows(head, torch.tensor(classes))
    head.hold(held(classes, positives, **options))
    return head, full


def batch(positives=POSITIVES, ignored=1):
    labels = torch.tensor([positives[i % len(positives)] for i in range(BATCH)])
    labels[BATCH - ignored :] = -100
    return torch.randn(BATCH, D, dtype=torch.float64), labels


def expected_losses(full, features, labels, positives, negatives, **options):
    """Losses by the reference from the weights of all classes; 0 for ignored examples."""
    scale, bias = full.scale if full.normalize else None, None if full.bias is None else full.bias.tolist()
    losses = []
    for feature, t in zip(features.tolist(), labels.tolist(), strict=True):
        o = dict(enumerate(references.logits_reference(feature, full.weight.tolist(), scale, bias)))
        losses.append(0.0 if t < 0 else references.loss_reference(o, positives, negatives, t, N, **options))
    return torch.tensor(losses, dtype=torch.float64)


# --- Outside a visit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_without_normalisation_it_is_a_linear_layer(bias):
    torch.manual_seed(3)
    linear = nn.Linear(D, N, bias=bias)
    torch.manual_seed(3)
    head = SampledSoftmaxHead(D, N, normalize=False, bias=bias)
    assert list(head.state_dict()) == list(linear.state_dict())
    features = torch.randn(2, 3, D)
    for mode in (True, False):
        assert torch.equal(head.train(mode)(features), linear(features))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_against_the_reference(kind):
    head = SampledSoftmaxHead(D, N, **KINDS[kind]).double()
    features, _ = batch()
    scale, bias = 20.0 if head.normalize else None, None if head.bias is None else head.bias.tolist()
    expected = [references.logits_reference(feature, head.weight.tolist(), scale, bias) for feature in features]
    for mode in (True, False):
        logits = head.train(mode)(features)
        torch.testing.assert_close(logits, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)
    assert head(features.reshape(1, BATCH, D)).shape == (1, BATCH, N)


def test_scale_is_a_factor():
    head = SampledSoftmaxHead(D, N, scale=3.0)
    features = torch.randn(BATCH, D)
    logits = head(features)
    assert logits.abs().max() < 3
    head.scale = 6.0
    torch.testing.assert_close(head(features), 2 * logits)


def test_the_length_of_rows_and_features_does_not_matter():
    for objective in OBJECTIVES:
        head, _ = holding(objective=objective)
        features, labels = batch()
        target = head.begin_batch(labels)
        loss = F.cross_entropy(head(features), target)
        head.weight.data *= torch.tensor([[0.1], [3.0], [1.0], [50.0], [7.0], [0.5], [2.0]])
        longer = features * torch.arange(1.0, BATCH + 1).unsqueeze(1)
        torch.testing.assert_close(F.cross_entropy(head(longer), target), loss, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_of_all_classes_is_the_full_softmax(reduction):
    head = SampledSoftmaxHead(D, N)
    features, target = torch.randn(BATCH, D, requires_grad=True), torch.randint(N, (BATCH,))
    target[2] = -100
    for mode in (True, False):
        loss = head.train(mode).loss(features, target, reduction)
        assert torch.equal(loss, F.cross_entropy(head(features), target, reduction=reduction))
    assert head.loss(features.reshape(1, BATCH, D), target.reshape(1, BATCH), "none").shape == (1, BATCH)


# --- In a visit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_is_the_clients_loss(kind, objective):
    head, full = holding(kind, objective=objective)
    features, labels = batch()
    target = head.begin_batch(labels)
    loss = F.cross_entropy(head(features), target, reduction="none")
    expected = expected_losses(full, features, labels, POSITIVES, NEGATIVES, objective=objective)
    torch.testing.assert_close(loss, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_equations(kind, objective):
    """Gradients of ln(1 + sum exp(o'_j - o'_t)) in the parameters of the full model."""
    head, full = holding(kind, objective=objective)
    features, labels = batch()
    features.requires_grad_()
    loss = head.loss(features, head.begin_batch(labels), "sum")
    gradients = torch.autograd.grad(loss, (features, *head.parameters()))

    o = F.linear(F.normalize(features), F.normalize(full.weight)) * 20 if full.normalize else full(features)
    if full.normalize and full.bias is not None:
        o = o + full.bias
    total = 0.0
    for row, t in zip(o, labels.tolist(), strict=True):
        if t >= 0:
            values = dict(enumerate(row))
            drawn = [] if objective == "posonly" else NEGATIVES
            shifted = references.corrected_reference(values, POSITIVES, drawn, N)
            negatives = references.pushing_reference(POSITIVES, NEGATIVES, t, N, objective)
            total = total + torch.stack([(shifted[j] - shifted[t]).exp() for j in negatives]).sum().log1p()
    of_features, *of_rows = torch.autograd.grad(total, (features, *full.parameters()))
    torch.testing.assert_close(gradients[0], of_features, atol=1e-10, rtol=1e-10)
    for gradient, expected in zip(gradients[1:], of_rows, strict=True):
        torch.testing.assert_close(gradient, expected[CLASSES], atol=1e-10, rtol=1e-10)
        assert not expected[[c for c in range(N) if c not in CLASSES]].any()


@pytest.mark.parametrize("objective", ["fedss", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_classes_held_are_the_plain_layer_bit_for_bit(kind, objective):
    head, full = holding(kind, range(N), objective=objective)
    features, labels = batch()
    target = head.begin_batch(labels)
    assert torch.equal(target, labels)
    losses = [F.cross_entropy(layer(features), labels) for layer in (head, full)]
    assert torch.equal(*losses)
    gradients = [
        torch.autograd.grad(loss, layer.parameters()) for loss, layer in zip(losses, (head, full), strict=True)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_is_cross_entropy_bit_for_bit(objective):
    head, _ = holding(objective=objective)
    features, labels = batch()
    features.requires_grad_()
    target = head.begin_batch(labels)
    for mode in (True, False):
        head.train(mode)
        losses = head.loss(features, target), F.cross_entropy(head(features), target)
        assert torch.equal(*losses)
        gradients = [torch.autograd.grad(loss, (features, head.weight)) for loss in losses]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_single_class_alone_teaches_nothing():
    head, _ = holding(classes=[4], positives=[4], objective="posonly")
    features, labels = batch([4])
    features.requires_grad_()
    loss = F.cross_entropy(head(features), head.begin_batch(labels))
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (features, head.weight)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_may_have_fewer_negatives(kind, objective):
    """Equals a client that only holds these classes."""
    head, full = holding(kind, objective=objective)
    features, labels = batch()
    fewer = [0, 2, 3, 5, 9]
    columns = torch.tensor([CLASSES.index(c) for c in fewer])
    target = head.begin_batch(labels, columns)
    assert target.tolist() == [fewer.index(c) if c >= 0 else c for c in labels.tolist()]
    assert torch.equal(head.relabel(labels), target)
    logits = head(features)
    assert logits.shape == (BATCH, len(fewer))
    loss = F.cross_entropy(logits, target, reduction="none")
    expected = expected_losses(full, features, labels, POSITIVES, [0, 5], objective=objective)
    torch.testing.assert_close(loss, expected, atol=1e-11, rtol=1e-11)
    gradient = torch.autograd.grad(loss.sum(), head.weight)[0]
    assert not gradient[[CLASSES.index(4), CLASSES.index(11)]].any()
    assert gradient[[CLASSES.index(c) for c in POSITIVES]].any(1).all()

    target = head.begin_batch(labels)  # the next batch uses all negatives again
    assert torch.equal(target, torch.tensor([CLASSES.index(c) if c >= 0 else c for c in labels.tolist()]))
    assert head(features).shape == (BATCH, len(CLASSES))


def test_evaluation_gives_plain_logits():
    head, full = holding(objective="negonly")
    features, labels = batch()
    head.begin_batch(labels, torch.tensor([CLASSES.index(c) for c in POSITIVES]))
    # Products have other shapes, so a processor may add terms in another order.
    torch.testing.assert_close(head.eval()(features), full(features)[:, CLASSES])
    assert head(features[:2]).shape == (2, len(CLASSES))


def test_released_it_is_as_before():
    head = SampledSoftmaxHead(D, N, bias=True)
    features, target = torch.randn(BATCH, D), torch.randint(N, (BATCH,))
    logits, state, text = head(features), copy.deepcopy(head.state_dict()), repr(head)
    attributes = {name: value for name, value in vars(head).items() if name != "_parameters"}
    head.hold(held(objective="negonly"))
    put_rows(head, torch.tensor(CLASSES))
    head.begin_batch(batch()[1])
    assert head.held.objective == "negonly"
    assert list(head.state_dict()) == list(state)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    assert {name: value.shape[0] for name, value in torch.load(file, weights_only=True).items()} == dict.fromkeys(
        state, 7
    )
    head.release()
    head.weight.data, head.bias.data = state["weight"], state["bias"]
    assert head.held is None
    assert {name: value for name, value in vars(head).items() if name != "_parameters"} == attributes
    assert repr(head) == text
    assert torch.equal(head(features), logits)
    assert torch.equal(head.loss(features, target), F.cross_entropy(logits, target))
    assert torch.equal(head.relabel(target), target)


def test_copies_hold_the_same():
    head, _ = holding(objective="negonly")
    features, labels = batch()
    head.begin_batch(labels)
    assert torch.equal(copy.deepcopy(head)(features), head(features))


def test_what_is_held_follows_to_the_device():
    for objective in OBJECTIVES:
        for columns in (None, torch.tensor([0, 1, 2, 5])):
            head, _ = holding("cosine with bias", objective=objective)
            features, labels = batch()
            head.begin_batch(labels, columns)
            logits = head.to("meta")(features.to("meta"))
            assert logits.device.type == "meta"
            assert logits.shape == (BATCH, 7 if columns is None else 4)
            head.loss(features.to("meta"), labels.to("meta"))


def test_labels_of_any_shape_and_type():
    head, _ = holding()
    labels = torch.tensor([[2, 9], [3, 2]], dtype=torch.int32).t()
    target = head.begin_batch(labels)
    assert target.tolist() == [[1, 2], [5, 1]]
    assert target.dtype == torch.int64
    assert head.relabel(torch.tensor([9, -7, -100])).tolist() == [5, -7, -100]


@pytest.mark.parametrize("objective", ["fedss", "negonly"])
def test_examples_in_several_dimensions(objective):
    head, _ = holding(objective=objective)
    features, labels = batch()
    flat = head.loss(features, head.begin_batch(labels), "none")
    target = head.begin_batch(labels.reshape(1, BATCH))
    logits = head(features.reshape(1, BATCH, D))
    losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    torch.testing.assert_close(losses, flat.reshape(1, BATCH))  # other strides, hence another order of the terms


def test_a_visit_is_plain_training_of_the_rows():
    """Three steps of SGD with momentum, against plain functions."""
    head, full = holding()
    rows = full.weight.detach()[CLASSES].clone().requires_grad_()
    is_positive = torch.tensor([c in POSITIVES for c in CLASSES])
    optimizers = [torch.optim.SGD([values], lr=0.1, momentum=0.9) for values in (head.weight, rows)]
    for _ in range(3):
        features, labels = batch()
        target = head.begin_batch(labels)
        plain = 20 * F.linear(F.normalize(features), F.normalize(rows))
        by_hand = F.cross_entropy(sampled_logits(plain, is_positive, log_correction(3, 4, N)), target)
        for optimizer, loss in zip(optimizers, (F.cross_entropy(head(features), target), by_hand), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert torch.equal(head.weight, rows)
    assert not torch.equal(head.weight, full.weight[CLASSES])


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, kind):
    """Cosines of half-precision weights and losses are computed in float32."""
    head = SampledSoftmaxHead(64, 1000, **KINDS[kind])
    wide = copy.deepcopy(head.to(dtype)).double()
    put_rows(head, torch.arange(500))
    classes = torch.arange(500)
    head.hold(SampledClasses(classes, classes < 20))
    features, labels = torch.randn(BATCH, 64).to(dtype).requires_grad_(), torch.arange(BATCH)
    target = head.begin_batch(labels)
    logits = head(features)
    assert logits.dtype == torch.float32
    loss = F.cross_entropy(logits, target)
    assert torch.equal(loss, head.loss(features, target))
    corrected = sampled_logits(wide(features.double())[:, :500], classes < 20, log_correction(20, 480, 1000))
    tolerance = 1e-5 if head.normalize else 1e-2
    torch.testing.assert_close(loss.double(), F.cross_entropy(corrected, target), atol=tolerance, rtol=tolerance)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (features, head.weight)))


def test_half_features_of_zeros_are_no_nan():
    head = SampledSoftmaxHead(D, N).half()
    assert torch.equal(head(torch.zeros(2, D).half()), torch.zeros(2, N))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    head, _ = holding(kind)
    head = head.float()
    features, labels = batch()
    target, features = head.begin_batch(labels), features.float()
    exact = F.cross_entropy(head(features), target)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
        loss = F.cross_entropy(logits, target)
        plain = head.eval()(features)
    assert logits.dtype == plain.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)
    assert not torch.equal(loss, exact)
    loss.backward()
    assert head.weight.grad.dtype == torch.float32


# --- Largest logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_size", "k", "kind"), pairs([None, 1, 3, 11, 12, 100], [1, 4, 12], list(KINDS)))
def test_topk_of_all_logits(kind, k, chunk_size):
    head = SampledSoftmaxHead(D, N, **KINDS[kind]).double()
    features = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    values, classes = head.topk(features, k, chunk_size)
    expected = head(features).detach().topk(k)
    assert torch.equal(classes, expected.indices)
    torch.testing.assert_close(values, expected.values, atol=1e-13, rtol=1e-13)
    assert not values.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_topk_of_held_classes_are_classes_of_all(training):
    head, full = holding("cosine with bias", objective="negonly")
    features, labels = batch()
    head.train(training).begin_batch(labels, torch.tensor([CLASSES.index(c) for c in POSITIVES]))
    values, classes = head.topk(features, 3, chunk_size=2)
    expected = full(features).detach()[:, CLASSES].topk(3)
    assert torch.equal(classes, torch.tensor(CLASSES)[expected.indices])
    torch.testing.assert_close(values, expected.values)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor created."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.parametrize("chunk_size", [None, 1000])
def test_topk_never_holds_all_logits(chunk_size):
    head, features = SampledSoftmaxHead(8, 50_000), torch.randn(200, 8)
    with LargestTensor() as memory:
        head.topk(features, 5, chunk_size)
    assert memory.largest <= (200 * 1005 if chunk_size else 1 << 22) < 200 * 50_000
    with LargestTensor() as memory:
        head(features)
    assert memory.largest >= 200 * 50_000


def test_topk_in_half_precision_ranks_in_float32():
    head = SampledSoftmaxHead(64, 500).half()
    features = torch.randn(20, 64).half()
    values, classes = head.topk(features, 5)
    expected = copy.deepcopy(head).double()(features.double()).topk(5)
    assert values.dtype == torch.float32
    assert torch.equal(classes, expected.indices)


def test_sampled_classes_become_held_ones():
    """From a client's labels to its loss."""
    labels = torch.tensor([77, 5, 77, 1234])
    positives = labels.unique()
    negatives = sample_negatives(positives, 10_000, 50, np.random.default_rng(0))
    classes = torch.cat([positives, negatives]).sort().values
    head = SampledSoftmaxHead(D, 10_000)
    put_rows(head, classes)
    head.hold(SampledClasses(classes, torch.isin(classes, positives)))
    target = head.begin_batch(labels)
    assert torch.equal(classes[target], labels)
    assert head(torch.randn(4, D)).shape == (4, 53)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_repr():
    assert repr(SampledSoftmaxHead(D, N)) == "SampledSoftmaxHead(in_features=5, num_classes=12, scale=20.0, bias=False)"
    assert "num_classes=12, normalize=False, bias=True" in repr(SampledSoftmaxHead(D, N, normalize=False, bias=True))


def classes_of(values, positives=(True,), **options):
    return SampledClasses(torch.tensor(values), torch.tensor(positives), **options)


def hold(values, positives, **options):
    SampledSoftmaxHead(D, N).hold(classes_of(values, positives, **options))


def begin(labels, columns=None, **options):
    holding(**options)[0].begin_batch(torch.as_tensor(labels), None if columns is None else torch.tensor(columns))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SampledSoftmaxHead(0, N), "`in_features` to be at least 1, but got 0"),
        (lambda: SampledSoftmaxHead(D, 2.5), "`num_classes` to be a whole number, but got 2.5"),
        (lambda: SampledSoftmaxHead(D, N, scale=0), "`scale` to be greater than 0 and finite, but got 0"),
        (lambda: SampledSoftmaxHead(D, N, scale=float("nan")), "but got nan"),
        (lambda: SampledSoftmaxHead(D, N, scale=1.0, normalize=False), "no `scale` with `normalize=False`"),
        (lambda: classes_of([2, 2], [True, True]), "`classes` to be a 1D int64 tensor with strictly increasing"),
        (lambda: classes_of([3, 2], [True, True]), "`classes` to be a 1D int64 tensor with strictly increasing"),
        (lambda: classes_of([2.0]), "values, but got torch.float32"),
        (lambda: classes_of([[2]]), r"of shape \(1, 1\)"),
        (lambda: classes_of([2], [1]), "`is_positive` to be of type bool"),
        (lambda: classes_of([2, 3]), r"shape \(2,\), but got torch.bool of shape \(1,\)"),
        (lambda: classes_of([2], [False]), "at least one of the client's classes"),
        (lambda: classes_of([2], objective="fedavg"), "`objective` to be one of"),
        (lambda: hold([-1, 2], [True, True]), "`classes` to be from 0 to 11, but got -1 to 2"),
        (lambda: hold([2, 12], [True, True]), "`classes` to be from 0 to 11, but got 2 to 12"),
        (lambda: hold([2, 11], [True, True], objective="full"), "all 12 classes for the objective 'full', but got 2"),
        (lambda: begin([2, 7, 1]), r"`target` to contain only the client's classes, but got \[1, 7\]"),
        (lambda: begin([2, 4]), r"contain only the client's classes, but got \[4\]"),  # held as a negative
        (lambda: begin([2, 99]), r"but got \[99\]"),
        (lambda: begin([2.0]), "`target` to contain integer class labels, but got torch.float32"),
        (lambda: begin([2], [1, 0]), "`columns` to be a 1D int64 tensor with strictly increasing"),
        (lambda: begin([2], [1, 7]), "`columns` to be from 0 to 6, but got 1 to 7"),
        (lambda: begin([2], [-1, 2]), "but got -1 to 2"),
        (lambda: begin([2], [0, 1, 2]), "all of the client's classes, but 1 are missing"),
        (lambda: begin([2], [1, 2, 6], classes=range(N), objective="full"), "but 2 are missing"),
        (
            lambda: begin([2], [2, 3, 9], classes=range(N), objective="full"),
            "all 12 classes for the objective 'full', but got 3",
        ),
        (
            lambda: SampledSoftmaxHead(D, N).topk(torch.zeros(1, D), 13),
            r"at most the number of classes \(12\), but got 13",
        ),
        (lambda: SampledSoftmaxHead(D, N).topk(torch.zeros(1, D), 0), "`k` to be at least 1"),
        (lambda: SampledSoftmaxHead(D, N).topk(torch.zeros(1, D), 1, 0), "`chunk_size` to be at least 1"),
        (lambda: SampledSoftmaxHead(D, N).loss(torch.zeros(1, D), torch.tensor([0]), "max"), "`reduction`"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_batch_of_a_head_that_holds_all():
    with pytest.raises(RuntimeError, match="call `hold` before"):
        SampledSoftmaxHead(D, N).begin_batch(torch.tensor([0]))


def test_other_rows_than_those_held():
    head = SampledSoftmaxHead(D, N)
    head.hold(held())
    features = torch.zeros(1, D)
    for call in (head, lambda x: head.loss(x, torch.tensor([1])), lambda x: head.topk(x, 1)):
        with pytest.raises(ValueError, match="7 rows, one per held class, but got 12"):
            call(features)
    put_rows(head, torch.tensor(CLASSES))
    assert head(features).shape == (1, 7)


def test_other_examples_than_the_batchs():
    head, _ = holding(objective="negonly")
    features, labels = batch()
    with pytest.raises(ValueError, match=r"a label for each of 7 examples, .* but got 0 labels from `begin_batch`"):
        head(features)
    target = head.begin_batch(labels)
    with pytest.raises(ValueError, match=r"a label for each of 14 examples, .* but got 7 labels .* to `loss`"):
        head(torch.cat([features, features]))
    twice = head.loss(torch.cat([features, features]), torch.cat([target, target]))
    torch.testing.assert_close(twice, F.cross_entropy(head(features), target))


def test_examples_whose_labels_do_not_matter():
    """For example, two views of a batch."""
    head, _ = holding()
    features, labels = batch()
    assert head(features).shape == (BATCH, 7)
    head.begin_batch(labels)
    assert head(torch.cat([features, features])).shape == (2 * BATCH, 7)


# --- Margins ----------------------------------------------------------------------------------------------------------


def margin_losses(full, features, labels, negatives, **options):
    """Losses by the reference from the cosines of all classes."""
    losses = []
    for feature, t in zip(features.tolist(), labels.tolist(), strict=True):
        cosines = dict(enumerate(references.logits_reference(feature, full.weight.tolist(), 1.0, None)))
        cosines = cosines if t < 0 else references.margin_reference(cosines, t, full.margin, full.margin_of)
        o = {j: full.scale * cosine for j, cosine in cosines.items()}
        losses.append(0.0 if t < 0 else references.loss_reference(o, POSITIVES, negatives, t, N, **options))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("margin", [{"margin": 0.5}, {"margin": 2.5}, {"margin": 0.35, "margin_of": "cosine"}])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_margins(margin, objective):
    """2.5 exceeds the angle at which ArcFace continues linearly."""
    full = SampledSoftmaxHead(D, N, scale=8.0, **margin).double()
    head = copy.deepcopy(full)
    put_rows(head, torch.tensor(CLASSES))
    head.hold(held(objective=objective))
    features, labels = batch()
    local = head.begin_batch(labels)
    expected = margin_losses(full, features, labels, NEGATIVES, objective=objective)
    torch.testing.assert_close(head.loss(features, local, "none"), expected)
    assert torch.equal(F.cross_entropy(head(features), local, reduction="none"), head.loss(features, local, "none"))
    torch.testing.assert_close(
        full.loss(features, labels, "none"), margin_losses(full, features, labels, [], objective="full")
    )


def test_a_margin_is_one_of_training_with_labels():
    head = SampledSoftmaxHead(D, N, margin=0.5)
    with pytest.raises(ValueError, match=r"labels: call `head.loss\(features"):
        head(torch.ones(2, D))
    plain = SampledSoftmaxHead(D, N)
    plain.load_state_dict(head.state_dict())
    assert torch.equal(head.eval()(torch.ones(2, D)), plain(torch.ones(2, D)))
    for options, message in (
        ({"margin": 3.2}, "at least 0 and below 3.142, but got 3.2"),
        ({"margin": 2.0, "margin_of": "cosine"}, "at least 0 and below 2, but got 2.0"),
        ({"margin": 0.1, "normalize": False}, "because margins apply to cosines"),
        ({"margin_of": "degrees"}, "`margin_of` to be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            SampledSoftmaxHead(D, N, **options)
