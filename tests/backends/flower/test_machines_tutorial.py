"""Tutorials on networks: run the shell commands on the pages, with nodes on this machine."""

import re
from importlib.util import find_spec

import pytest

pytest.importorskip("flwr")

from tests.backends.flower.processes import ROOT
from tests.backends.flower.test_deploy_guide import Shell, skip_if_taken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```|((?:^    [^\n]*\n)+)', re.DOTALL | re.MULTILINE)
NEEDS = {"machines": (), "mri": ("monai", "nvflare", "dp_accounting", "opacus")}


@pytest.mark.parametrize("name", NEEDS)
def test_the_page_ends_with_the_weights_of_one_process(name, tmp_path):
    for package in NEEDS[name]:
        if not find_spec(package):
            pytest.skip(f"{package} is not installed")
    skip_if_taken(9092, 8000)
    text, printed = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(), ""
    code = re.sub(r"^```text\n.*?^```\n", "", text.split("\n## ", 1)[1], flags=re.DOTALL | re.MULTILINE)
    with Shell(tmp_path) as shell:
        for file, content, lines in BLOCK.findall(code):
            if file:
                (tmp_path / file).write_text(content)
                continue
            block = re.sub("^    ", "", lines, flags=re.MULTILINE)
            for command in [block] if block.startswith("python -c") else block.splitlines():
                if "start_server.sh" in command:
                    shell.start(command, "Nodes connect to the server at")
                elif "start_node.sh" in command:
                    shell.start(command, "Waiting for messages at")
                else:
                    status, printed = shell.run(command)
                    assert status == 0, f"{command}\n{printed}"
    assert printed.strip() == "True"
