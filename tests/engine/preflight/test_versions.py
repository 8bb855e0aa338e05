"""Installed versions against those that are accepted and those that were tested."""

import logging

import pytest

from epfsdp2.engine.compat import versions
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.run import check_versions
from tests.support.trainer.preflight import paragraph


@pytest.mark.parametrize("name", ["verl", "ray", "vllm", "sglang"])
def test_check_versions_of_a_missing_distribution_is_refused(monkeypatch, name):
    version = versions.installed
    monkeypatch.setattr(versions, "installed", lambda asked: None if asked == name else version(asked))
    with pytest.raises(SettingError, match=f"(?i){name} is not installed.*pip install"):
        check_versions("sglang" if name == "sglang" else "vllm")
    if name in ("vllm", "sglang"):
        check_versions("trtllm")


@pytest.mark.parametrize(
    "name, version", [("verl", "0.10.1"), ("vllm", "0.23.0"), ("vllm", "0.99.0"), ("transformers", "5.6.0")]
)
def test_check_versions_outside_the_range_is_refused_with_it(installs, name, version):
    installs(name, version)
    with pytest.raises(SettingError) as caught:
        check_versions("vllm")
    text = paragraph(caught.value, name, version)
    assert f"outside {versions.accepted()[name]}" in text and text.endswith(f"'{name}{versions.accepted()[name]}'")


@pytest.mark.parametrize("name, version", [("torch", "2.11.0a0+nv26.10"), ("torch", "2.12.1"), ("vllm", "0.25.1")])
def test_check_versions_in_the_range_and_not_run_warns_with_those_that_were(installs, caplog, name, version):
    installs(name, version)
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        check_versions("vllm")
    (record,) = caplog.records
    shown = ", ".join(versions.tested(name))
    assert record.getMessage() == f"epfsdp2: {name} {version} was not tested with; tested: {name} {shown}"


def test_check_versions_of_the_installed_ones_warns_of_nothing(caplog):
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        check_versions("vllm")
    assert not caplog.records
