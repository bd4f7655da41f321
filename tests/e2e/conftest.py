"""Servers end with the test run, however it ends."""

from .server import exit_on_sigterm


def pytest_sessionstart() -> None:
    exit_on_sigterm()
