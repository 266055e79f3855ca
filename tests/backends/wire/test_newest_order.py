"""Orders by server start and round: late orders from a killed server are refused, and later starts are larger."""

import pytest

from lightning_fed.backends.wire import run_folder
from lightning_fed.backends.wire.newest_order import refuse_older_order
from lightning_fed.backends.wire.packets import TrainRequest
from lightning_fed.backends.wire.run_folder import count_start
from lightning_fed.errors import ClientFault
from lightning_fed.server.schedule import Visit


def order(start, round, client="ann"):
    return TrainRequest("0a", Visit(client, round, 7), -1, 0, 0, "", {}, start=start)


def test_an_older_order_is_refused(tmp_path):
    for start, round in ((5, 2), (5, 2), (5, 3), (6, 1), (6, 2)):
        refuse_older_order(tmp_path, order(start, round))
    for start, round in ((5, 2), (5, 9), (6, 1)):
        with pytest.raises(ClientFault, match="newer request"):
            refuse_older_order(tmp_path, order(start, round))
    refuse_older_order(tmp_path, order(5, 2, "bob"))
    refuse_older_order(tmp_path, order(6, 2))


def test_numbers_of_starts_grow(tmp_path, monkeypatch):
    """Also after a clock set back, and in a folder restored from a backup."""
    now = [100.0]
    monkeypatch.setattr(run_folder.time, "time", lambda: now[0])
    numbers = [count_start(tmp_path)]
    backup = (tmp_path / "start").read_text()
    for now[0] in (100.0, 50.0, 200.0, 200.5):
        numbers.append(count_start(tmp_path))
    (tmp_path / "start").write_text(backup)
    now[0] = 300.0
    numbers.append(count_start(tmp_path))
    assert numbers == [100, 101, 102, 200, 201, 300]
