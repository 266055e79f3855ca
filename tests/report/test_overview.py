"""The overview of a comparison: the summary's numbers, the pictures in the file, and links to all reports."""

import base64
import re

from lightning_fed.report.overview import write_overview
from lightning_fed.report.terminal import draw_tables

TEXT = "Two methods.\n\n| method | loss | MB |\n|---|---:|---:|\n| `a<b>` | 0.25 ± 0 | 3 |\n| c | 0.5 |  |\n\nSee `c`."


def test_an_overview(tmp_path):
    for name in ("fedavg_0", "fedprox_mu=0.1_0", "50%_0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "report.html").write_text(name)
    (tmp_path / "curves.png").write_bytes(b"picture")
    path = write_overview(tmp_path, "Comparison & more", TEXT)
    page = path.read_text()
    assert path == tmp_path / "overview.html"
    assert "<title>Comparison &amp; more</title>" in page
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows == [["method", "loss", "MB"], ["a&lt;b&gt;", "0.25 ± 0", "3"], ["c", "0.5", ""]]
    shown = [line.split("  ")[0] for line in draw_tables(TEXT).split("\n")[2:6] if "--" not in line]
    assert shown == ["method", "a<b>", "c"]  # as in the terminal
    assert re.findall(r"<p>(.*?)</p>", page) == ["Two methods.", "See c."]
    (address,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(address) == b"picture"
    links = dict(re.findall(r'<li><a href="([^"]+)">(.*?)</a>', page))
    assert links == {
        "runs/50%25_0/report.html": "50%_0",
        "runs/fedavg_0/report.html": "fedavg_0",
        "runs/fedprox_mu%3D0.1_0/report.html": "fedprox_mu=0.1_0",
    }
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
