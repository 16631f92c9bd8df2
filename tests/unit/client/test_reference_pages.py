from __future__ import annotations

import dataclasses

from tests.unit.client import reference_pages
from tidelog.client.config import AdminConfig, ConsumerConfig, ProducerConfig


def test_the_reference_is_made_from_the_docstrings_of_today():
    assert reference_pages.REFERENCE.read_text() == reference_pages.reference(), f"run: {reference_pages.COMMAND}"


def test_the_table_of_options_has_each_option_of_the_code():
    page = reference_pages.OPTIONS.read_text()
    assert page == reference_pages.options(), f"run: {reference_pages.COMMAND}"
    for config in (AdminConfig, ProducerConfig, ConsumerConfig):
        for field in dataclasses.fields(config):
            assert f"\n| `{field.name}` |" in page


def test_no_docstring_speaks_of_a_parameter_that_the_page_leaves_out():
    named = [
        f"{owner.__name__}.{name}: {parameter}"
        for owner in reference_pages._CLIENTS
        for name, method in reference_pages._methods(owner)
        for parameter in reference_pages._INTERNAL_PARAMETERS - {"self"}
        if f"`{parameter}`" in (method.__doc__ or "")
    ]
    assert named == []


def test_each_public_method_has_a_docstring():
    missing = [
        f"{owner.__name__}.{name}"
        for owner in reference_pages._CLIENTS
        for name, method in reference_pages._methods(owner)
        if not method.__doc__
    ]
    assert missing == []
