"""The reference page says what the options are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lora_server.cli.reference import render_reference
from lora_server.config import ServerConfig
from lora_server.option_fields import flag_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_every_option_and_variable_is_on_the_page() -> None:
    page = render_reference()

    for config_field in dataclasses.fields(ServerConfig):
        assert f"`{flag_of(config_field.name)}`" in page
        assert f"`LORA_SERVER_{config_field.name.upper()}`" in page
    for flag in (
        "--once",
        "--prepare",
        "--trace",
        "--goodput",
        "--tolerance",
        "--lora-extra-vocab-size",
    ):
        assert f"`{flag}`" in page


@pytest.mark.skipif(not PAGE.is_file(), reason="the package is tested outside its repository")
def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference()
