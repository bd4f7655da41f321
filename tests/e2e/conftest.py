"""Servers end with the test run, however it ends."""

from .server import interrupt_on_sigterm


def pytest_sessionstart() -> None:
    interrupt_on_sigterm()
