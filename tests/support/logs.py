"""The lines that this package logs in a process of a test."""

import logging

__all__ = ["logged_lines"]


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged_lines() -> list[str]:
    """Return a list to which every line that is logged from now on is appended."""
    handler = _Lines()
    logging.getLogger("epfsdp2").addHandler(handler)
    return handler.lines
