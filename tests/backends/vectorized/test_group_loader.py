"""Interleaved batches of several clients: order, random numbers, and stacking."""

import random
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from lightning_fed.backends.vectorized.group_loader import ClientGenerators, detect_draws, stack_batches
from lightning_fed.data.batch_structure import batch_tensors, rebuild_batch
from lightning_fed.data.population import seed_everything

Pair = namedtuple("Pair", ["image", "label"])


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def alone(seed, count):
    seed_everything(seed)
    return [draw() for _ in range(count)]


def test_clients_draw_in_turns_what_they_would_draw_alone():
    expected = {0: alone(7, 3), 1: alone(8, 3)}
    numbers, drawn = ClientGenerators([7, 8]), {0: [], 1: []}
    for client in (0, 1, 1, 0, 0, 1):
        numbers.switch_to(client)
        drawn[client].append(draw())
    assert drawn == expected


def test_torchs_numbers_alone():
    """Python's and NumPy's generators are shared by all clients."""
    numbers = ClientGenerators([7, 8], everywhere=False)
    drawn = []
    for client in (0, 1, 0):
        numbers.switch_to(client)
        drawn.append(draw())
    expected = alone(7, 2)
    assert (drawn[0], drawn[2][2]) == (expected[0], expected[1][2])
    assert drawn[2][0] != expected[1][0]


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [(random.random, True), (np.random.rand, True), (lambda: torch.rand(1), False), (lambda: None, False)],
)
def test_draws_are_noticed(draw, drawn):
    with detect_draws() as has_drawn:
        draw()
    assert has_drawn == [drawn]


def test_batches_of_one_form_are_stacked_whatever_holds_them():
    def batch(size, name="a", dtype=torch.float32):
        return {"pair": Pair(torch.full((size, 2), size, dtype=dtype), [torch.zeros(size)]), "name": name}

    batches = {0: batch(3), 2: batch(3), 3: batch(2), 5: batch(3, "b"), 6: batch(3, dtype=torch.float64), 7: batch(2)}
    parts = stack_batches(batches)
    assert [part.clients for part in parts] == [(0, 2), (3, 7), (5,), (6,)]
    assert isinstance(parts[0].batch["pair"], Pair)
    for part in parts:
        for row, client in enumerate(part.clients):
            rebuilt = rebuild_batch(part.batch, iter([tensor[row] for tensor in batch_tensors(part.batch)]))
            assert rebuilt["name"] == batches[client]["name"]
            assert torch.equal(rebuilt["pair"].image, batches[client]["pair"].image)
            assert torch.equal(rebuilt["pair"].label[0], batches[client]["pair"].label[0])


def test_a_batch_with_a_default_is_rebuilt():
    """Collators in transformers, for example, return such batches."""
    batch = defaultdict(list, image=torch.zeros(2), tags=OrderedDict(weight=torch.ones(2)))
    (part,) = stack_batches({0: batch, 1: batch})
    assert type(part.batch) is defaultdict
    assert part.batch["image"].shape == (2, 2)
    assert type(part.batch["tags"]) is OrderedDict
    assert part.batch["missing"] == []
