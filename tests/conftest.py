"""What every test is kept from leaving behind."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_log_settings():
    """Commands set up the package's logger; the next test finds it as it was."""
    logger = logging.getLogger("deepinfer")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
