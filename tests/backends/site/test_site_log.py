"""A site's log under a policy: NVFLARE streams log files to the server."""

import logging
import stat

import pytest
from torch import nn

from lightning_fed import Federation
from lightning_fed.backends.site.site_log import LOG_FILE
from lightning_fed.backends.wire.runner import ClientRunner
from tests import models

LOGGER = logging.getLogger("lightning_fed")


@pytest.fixture(autouse=True)
def restored():
    before = list(LOGGER.handlers)
    yield
    LOGGER.propagate = True
    for handler in [handler for handler in LOGGER.handlers if handler not in before]:
        LOGGER.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("has_policy", [True, False])
def test_texts_of_faults_go_to_a_file_of_the_site(has_policy, tmp_path, caplog):
    if has_policy:
        (tmp_path / "site_policy.toml").touch()
    data = models.as_datasets(models.vectors({"ann": 8}))
    runner = ClientRunner(Federation(), lambda: models.Module(nn.Linear(6, 3)), data, None, store=tmp_path)
    for _ in range(2):
        runner.keep_log()
    logging.getLogger("lightning_fed.backends.wire.runner").error("patient 17")
    assert ("patient 17" in caplog.text) is not has_policy
    file = tmp_path / LOG_FILE
    assert file.exists() is has_policy
    if has_policy:
        assert file.read_text().count("patient 17") == 1
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
