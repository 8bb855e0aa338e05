"""Fixtures for the checks of a run: a model, and installed versions."""

import pytest

from epfsdp2.engine.compat import versions
from tests.support.trainer.settings import checkpoint


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path)


@pytest.fixture
def installs(monkeypatch):
    """Return a function that makes a distribution look installed in a version."""

    def install(name, version):
        installed = versions.installed
        monkeypatch.setattr(versions, "installed", lambda asked: version if asked == name else installed(asked))

    return install
