"""Invariant 3 at every point: a fit killed at a lasting effect and resumed equals an uninterrupted fit.

`crash_points.py` defines fits and points.
"""

import errno
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import warm_process
from tests.crash_points import FAILING, ON_FLOWER, RUNS, SEAMS

SHORT = ("fedper",)
OF_FLOWER = {"message sent", "message awaited"}


def killed(folder, runs, **options):
    """Kills fits in a separate process; returns the names of points and the differences by run."""
    jobs = [{"run": run, "folder": str(folder / f"{index}"), **options} for index, run in enumerate(runs)]
    for job in jobs:
        Path(job["folder"]).mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    warm_process.run("tests.crash_points", folder / "jobs.json", seconds=None)
    return {job["run"]: json.loads((Path(job["folder"]) / "found.json").read_text()) for job in jobs}


def ours(points, found):
    return {f"{point} {points[int(point)]}": names for point, (names, _) in found.items() if names}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return killed(tmp_path_factory.mktemp("short"), SHORT)


@pytest.mark.parametrize("run", SHORT)
def test_one_point_of_each_kind(run, short):
    points, found = short[run]["points"], short[run]["found"]
    assert {points[int(point)].partition(",")[0] for point in found} == SEAMS.keys() - OF_FLOWER
    assert ours(points, found) == {}


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(errno.ENOSPC, id="disk full"),
        pytest.param(errno.EROFS, id="disk read-only", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails(error, tmp_path):
    """The fit ends with the disk's error, and resumes from the files once space is free."""
    points, found = killed(tmp_path, ["fedper"], error=error)["fedper"].values()
    assert {points[int(point)].partition(",")[0] for point in found} == set(FAILING[error])
    assert ours(points, found) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", [*RUNS, *(ON_FLOWER if find_spec("flwr") else ())])
def test_every_point(run, tmp_path):
    points, found = killed(tmp_path, [run], all=True)[run].values()
    assert len(found) == len(points) > (45 if run == "fedasync" else 90)
    assert ours(points, found) == {}
