"""Lines that this package logs in a test's process."""

import logging

__all__ = ["logged_lines"]


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged_lines() -> list[str]:
    """Return a list that collects all lines logged from now on."""
    handler = _Lines()
    logging.getLogger("epfsdp2").addHandler(handler)
    return handler.lines
