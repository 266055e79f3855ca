import os
import stat

import pytest

from lightning_fed.atomic_files import atomic_write, write_text_atomically


def write_half(path):
    with atomic_write(path) as partial:
        partial.write_text("aft")
        raise TypeError("text, not 5")


def test_a_file_that_fails_half_way_leaves_the_one_before(tmp_path):
    path = tmp_path / "results.json"
    write_text_atomically(path, "before")
    with pytest.raises(TypeError, match="not 5"):
        write_half(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    write_text_atomically(path, "after")
    assert path.read_text() == "after"


def test_a_new_file_survives_a_loss_of_power(tmp_path, monkeypatch):
    """The order matters: contents, name, folder. Without the folder, a loss of power brings back the old file."""
    events, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("replace") or replace(*paths))
    write_text_atomically(tmp_path / "file", "text")
    assert events == [False, "replace", True]
