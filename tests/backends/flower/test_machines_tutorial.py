"""The tutorial with two nodes: runs the shell commands on the page."""

import re

import pytest

pytest.importorskip("flwr")

from tests.backends.flower.processes import ROOT
from tests.backends.flower.test_deploy_guide import Shell, skip_if_taken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs" / "tutorials" / "machines.md"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```|((?:^    [^\n]*\n)+)', re.DOTALL | re.MULTILINE)


def test_the_page_ends_with_the_weights_of_one_process(tmp_path):
    skip_if_taken(9092, 8000)
    printed = ""
    with Shell(tmp_path) as shell:
        for file, text, lines in BLOCK.findall(PAGE.read_text().split("\n## ", 1)[1]):
            if file:
                (tmp_path / file).write_text(text)
                continue
            block = re.sub("^    ", "", lines, flags=re.MULTILINE)
            for command in [block] if block.startswith("python") else block.splitlines():
                if "start_server.sh" in command:
                    shell.start(command, "Nodes connect to the server at")
                elif "start_node.sh" in command:
                    shell.start(command, "Waiting for messages at")
                else:
                    status, printed = shell.run(command)
                    assert status == 0, f"{command}\n{printed}"
    assert printed.strip() == "True"
