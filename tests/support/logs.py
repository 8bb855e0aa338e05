"""Lines that this package logs in a test's process."""

import logging

__all__ = ["logged_lines"]


def logged_lines() -> list[str]:
    """Return a list that collects all lines logged from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("epfsdp2").addHandler(handler)
    return lines
