"""What every test is kept from leaving behind, and examples that repeat."""

import logging

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, however long the machine takes for them.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def own_log_settings():
    """Commands set up the package's logger; the next test finds it as it was."""
    logger = logging.getLogger("deepinfer")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
