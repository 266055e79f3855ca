"""Messages: contents and sizes in bytes."""

import pytest
import torch

from lightning_fed.messages import Broadcast, ClientUpdate, Request, message_bytes, tensor_bytes

SIZES = {
    torch.float64: 8,
    torch.float32: 4,
    torch.bfloat16: 2,
    torch.float16: 2,
    torch.complex64: 8,
    torch.int64: 8,
    torch.uint8: 1,
    torch.bool: 1,
}


@pytest.mark.parametrize("dtype", SIZES)
def test_bytes_of_a_tensor(dtype):
    assert tensor_bytes({"a": torch.zeros(3, 5, dtype=dtype)}) == 15 * SIZES[dtype]
    assert tensor_bytes({"a": torch.zeros((), dtype=dtype)}) == SIZES[dtype]
    assert tensor_bytes({"a": torch.zeros(0, 4, dtype=dtype)}) == 0


def test_bytes_are_those_of_the_values_and_not_of_the_memory_behind_them():
    large = torch.zeros(1000, 1000)
    assert tensor_bytes({"row": large[3], "column": large[:, 3], "spread": torch.zeros(1).expand(7)}) == 4 * 2007
    assert tensor_bytes({"not there": torch.empty(10, device="meta")}) == 40
    assert tensor_bytes({}) == 0


def test_messages_count_state_and_extras():
    state, extras = {"w": torch.zeros(4)}, {"prototypes": torch.zeros(2, 3, dtype=torch.float64)}
    assert message_bytes(Broadcast(0, state)) == 16
    assert message_bytes(Broadcast(0, state, extras)) == 64
    update = ClientUpdate("a", 3, state, extras, {"loss": 1.0})
    assert message_bytes(update) == 64  # plain numbers are only logged
    del update.extras["prototypes"]
    assert message_bytes(update) == 16


def test_rows_of_several_entries_are_asked_for_once():
    rows = torch.tensor([2, 5, 7])
    assert message_bytes(Request("a", {"weight": rows, "bias": rows})) == 24
    assert message_bytes(Request("a", {"weight": rows, "bias": rows.clone()})) == 24
    assert message_bytes(Request("a", {"weight": rows, "words": torch.tensor([2, 5]), "bias": rows})) == 40
    assert message_bytes(Request("a", {"weight": rows, "words": rows + 1})) == 48
    assert message_bytes(Request("a")) == 0
    extras = {"has": torch.tensor([1, 2]), "is": torch.tensor([1, 2])}
    assert message_bytes(Request("a", {"weight": rows}, extras)) == 24 + 32  # extras of any name count


def test_extras_are_not_shared():
    first, second = ClientUpdate("a", 1, {}), ClientUpdate("b", 1, {})
    first.extras["x"] = torch.zeros(1)
    first.metrics["loss"] = 1.0
    assert not second.extras
    assert not second.metrics
    Broadcast(0, {}).extras["x"] = torch.zeros(1)
    assert not Broadcast(0, {}).extras
