"""The record of a site's answers: crashes, manual changes, and the command."""

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.site import gate
from lightning_fed.backends.site.gate import NOT_ANSWERED
from lightning_fed.backends.site.record import HEAD_FILE, Record, RecordError, read_record
from lightning_fed.backends.wire.packets import PacketError, write_packet
from lightning_fed.callbacks.federation import Federation
from lightning_fed.cli.main import main
from tests import models
from tests.backends.flower.halves import OPTIONS, SIZES, clients_of
from tests.backends.site.test_policy import write_policy

HELLO = write_packet("hello", {})


def content(number):
    return {"time": f"2026-11-24T12:00:{number:02d}+00:00", "number": number}


@pytest.fixture
def record(tmp_path):
    written = Record(tmp_path / "record.jsonl", tmp_path / HEAD_FILE)
    for number in range(4):
        with written.open():
            written.append(content(number))
    return tmp_path / "record.jsonl"


def numbers(path):
    return [line.content["number"] for line in read_record(path)]


def test_a_changed_byte_and_a_cut_inside_a_line_are_found(record):
    """At every fifth byte, and at the ends of the lines."""
    whole = record.read_bytes()
    assert numbers(record) == [0, 1, 2, 3]
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for index in sorted({*range(0, len(whole), 5), *ends[:-1], *(end - 1 for end in ends)}):
        record.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(RecordError, match=r"line [1-4] of the site's record \(message log\) was"):
            numbers(record)
        record.write_bytes(whole[:index])
        if index in (0, *ends):  # only detectable with an external copy of the head
            assert len(numbers(record)) == ([0, *ends]).index(index)
        else:
            with pytest.raises(RecordError, match="was truncated"):
                numbers(record)


@pytest.mark.parametrize("kept", [[1, 2, 3], [0, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3]])
def test_lines_that_are_left_out_moved_or_repeated_are_found(record, kept):
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[index] for index in kept))
    with pytest.raises(RecordError):
        numbers(record)


def test_a_line_that_a_crash_has_cut_off_stays_and_is_vouched_for_by_the_next(record):
    """The record is append-only. The next line's digest also covers the cut line."""
    whole, third = record.read_bytes(), list(read_record(record))[2]
    record.write_bytes(whole[:-20])
    (record.parent / HEAD_FILE).write_text(json.dumps({"line": 3, "digest": third.digest}))  # written after the line
    again = Record(record, record.parent / HEAD_FILE)
    with again.open():
        again.append(content(7))
    assert record.read_bytes().startswith(whole[:-20] + b"\n")
    assert numbers(record) == [0, 1, 2, 7]
    with again.open():  # for the process that wrote the line and for a new process
        again.append(content(8))
    with Record(record, record.parent / HEAD_FILE).open():
        pass
    changed = bytearray(record.read_bytes())
    changed[len(whole) - 30] ^= 1
    record.write_bytes(changed)
    with pytest.raises(RecordError, match="line 4"):
        numbers(record)


@pytest.mark.parametrize("cut", [0, 1, 40, 120])
def test_several_crashes_in_sequence_do_not_end_a_record(record, cut):
    """A crash also truncates the line after a truncated line, once more each time."""
    third, head = list(read_record(record))[2], record.parent / HEAD_FILE
    whole = record.read_bytes()[:-20]
    for _ in range(3):
        record.write_bytes(whole)
        head.write_text(json.dumps({"line": 3, "digest": third.digest}))
        again = Record(record, head)
        with again.open():
            again.append(content(7))
        assert numbers(record) == [0, 1, 2, 7]
        whole = record.read_bytes()[: len(whole) + cut]
    changed = bytearray(record.read_bytes())
    changed[len(whole) - 1 - cut] ^= 1
    record.write_bytes(changed)
    with pytest.raises(RecordError, match=r"line [45] of the site's record \(message log\) was altered"):
        numbers(record)


def test_several_may_write_one_record(record):
    start = threading.Barrier(4)

    def write(_):
        written = Record(record, record.parent / HEAD_FILE)
        start.wait()
        for number in range(10, 35):
            with written.open():
                time.sleep(0.002)  # long enough for another writer to intervene
                written.append(content(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert sorted(numbers(record)) == sorted([0, 1, 2, 3, *4 * [*range(10, 35)]])


def site(tmp_path):
    write_policy(tmp_path)
    app = client_app(Federation(), lambda: None, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path)
    return app.runner, tmp_path / "site_record.jsonl"


def replaced_by_link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "the record is shorter than before"),
        (
            lambda path: path.write_bytes(b"x" + path.read_bytes() + b"x\n"),
            "line 3 of the site's record (message log) was altered",
        ),
        (lambda path: path.chmod(0o666), "other users can change"),
        (replaced_by_link, "symbolic link"),
    ],
)
def test_nothing_leaves_that_the_record_cannot_have(tmp_path, caplog, spoil, reason):
    runner, path = site(tmp_path)
    for _ in range(2):
        runner.answer("query", HELLO, {})
    spoil(path)
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        runner.answer("query", HELLO, {})
    assert reason in caplog.text


def test_a_full_disk_lets_nothing_leave(tmp_path, monkeypatch):
    """Once space is free, the next line covers the partial line."""
    runner, path = site(tmp_path)
    runner.answer("query", HELLO, {})
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda descriptor, data: write(descriptor, data[:30]))
        with pytest.raises(PacketError, match=NOT_ANSWERED):
            runner.answer("query", HELLO, {})
    with monkeypatch.context() as patch:

        def fails(descriptor):
            raise OSError(errno.EIO, "input/output error")

        patch.setattr("os.fsync", fails)
        with pytest.raises(PacketError, match=NOT_ANSWERED):
            runner.answer("query", HELLO, {})
    runner.answer("query", HELLO, {})
    lines = list(read_record(path))
    assert ["torn" in line.content for line in lines] == [False, True, False]


def test_the_command(tmp_path, capsys):
    runner, path = site(tmp_path)
    for _ in range(3):
        runner.answer("query", HELLO, {})
    main(["audit", str(path), "--last", "1"])
    shown = capsys.readouterr().out
    head = [line.digest for line in read_record(path)][-1]
    assert "clients: sent, 0 names" in shown
    assert f"3 lines verified; head {head}" in shown
    assert "pass an earlier head kept elsewhere" in shown
    main(["audit", str(path), "--head", head, "--full"])
    assert json.loads(capsys.readouterr().out.splitlines()[0].split(" ", 2)[2])["answer"] == "clients"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for changed, error in (
        (b"".join(lines[:2]), f"no line has the digest {head}: the record was truncated"),
        (
            whole.replace(b"clients", b"clientz"),
            "line 1 of the site's record (message log) was altered, or the file is not `site_record.jsonl`",
        ),
    ):
        path.write_bytes(changed)
        with pytest.raises(SystemExit):
            main(["audit", str(path), "--head", head])
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path, head: path.rename(path.with_suffix(".old")), "the record is missing, but"),
        (lambda path, head: path.write_bytes(b""), "line 3 is missing"),
        (
            lambda path, head: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:2])),
            "line 3 is missing",
        ),
        (lambda path, head: head.unlink(), "is missing"),
        (lambda path, head: head.write_text("{}"), "cannot be read"),
        (
            lambda path, head: head.write_text(head.read_text().replace('"digest": "', '"digest": "0')),
            "differs from the digest",
        ),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_record_that_is_shorter_than_its_head_closes_the_site(spoil, reason, is_new, tmp_path, caplog):
    runner, path = site(tmp_path)
    for _ in range(3):
        runner.answer("query", HELLO, {})
    spoil(path, tmp_path / HEAD_FILE)
    if is_new:
        runner, _ = site(tmp_path)
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        runner.answer("query", HELLO, {})
    assert reason in caplog.text or "the record is shorter than before" in caplog.text


def test_a_rotated_record_continues_the_old_one(tmp_path, capsys):
    runner, path = site(tmp_path)
    for _ in range(3):
        runner.answer("query", HELLO, {})
    (*_, last) = read_record(path)
    main(["audit", str(path), "--rotate"])
    assert "the operator archived the record up to line 3" in capsys.readouterr().out
    assert [line.digest for line in read_record(tmp_path / "site_record.jsonl.3")][-1] == last.digest
    for answering in (runner, site(tmp_path)[0]):  # the same process, and a new process
        answering.answer("query", HELLO, {})
    lines = list(read_record(path))
    assert [line.number for line in lines] == [4, 5, 6]
    assert lines[0].content["digest"] == last.digest
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:1]))
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        site(tmp_path)[0].answer("query", HELLO, {})


def test_a_record_of_an_earlier_release_is_rotated(tmp_path):
    """Earlier releases wrote no head: until the rotation nothing leaves."""
    runner, path = site(tmp_path)
    for _ in range(2):
        runner.answer("query", HELLO, {})
    (tmp_path / HEAD_FILE).unlink()
    with pytest.raises(PacketError, match=NOT_ANSWERED):
        site(tmp_path)[0].answer("query", HELLO, {})
    main(["audit", str(path), "--rotate"])
    site(tmp_path)[0].answer("query", HELLO, {})
    assert [line.number for line in read_record(path)] == [3, 4]


def test_a_record_unlike_its_head_is_not_rotated(tmp_path, capsys):
    runner, path = site(tmp_path)
    for _ in range(3):
        runner.answer("query", HELLO, {})
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:2]))
    with pytest.raises(SystemExit):
        main(["audit", str(path), "--rotate"])
    assert "line 3 is missing" in capsys.readouterr().err
    assert path.exists()


def test_a_clock_that_was_ahead_is_set_by_the_operator(tmp_path, monkeypatch, capsys):
    """After a clock error of ten years the record's time stays ahead until the operator resets the clock."""
    runner, path = site(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "time", SimpleNamespace(time=lambda: time.time() + 3650 * 86400))
        runner.answer("query", HELLO, {})
    runner.answer("query", HELLO, {})
    ahead = [line.time - time.time() for line in read_record(path)]
    assert min(ahead) > 3649 * 86400
    main(["audit", str(path), "--set-clock"])
    assert "the operator set the record's clock" in capsys.readouterr().out
    runner.answer("query", HELLO, {})
    assert abs(list(read_record(path))[-1].time - time.time()) < 60
