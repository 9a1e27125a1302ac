"""Settings for every test: the same inputs every time, and no verdict that depends on how busy the machine is."""

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-s", type=float, default=60.0, help="seconds of faults in tests/chaos")
    parser.addoption("--chaos-seed", type=int, default=1, help="which faults")
