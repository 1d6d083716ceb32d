"""Requests made from the server's own OpenAPI document, and what every answer must be like.

Random names and paths are refused at the door. So that requests get further, the document that
they are made from is narrowed to names that exist; answers are held to the document as it is.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from schemathesis import APIOperation, Case

    Operation = APIOperation[Any, Any, Any, Any]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    allow_header_conformance,
    ignored_auth,
]
_TIMEOUT_S = 60.0


def narrowed(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document whose bodies have these schemas for properties of these names."""
    made: dict[str, Any] = copy.deepcopy(dict(document))
    for name, schema in made["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if name.endswith("Body"):
            for field in properties.keys() & values.keys():
                properties[field] = values[field]
    return made


class Fuzzer:
    """Sends requests to one server; the same seed sends the same ones."""

    def __init__(
        self, url: str, key: str, document: Mapping[str, Any], *, mode: GenerationMode
    ) -> None:
        """Read a document.

        Args:
            url: the server's.
            key: opens everything.
            document: what requests are made from.
            mode: whether they follow the document. Those that do not have to be refused, so the
                document must not be narrowed then.
        """
        self._url = url
        self._mode = mode
        self._checks = list(CHECKS)
        if mode is GenerationMode.NEGATIVE:
            self._checks.append(negative_data_rejection)
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session = requests.Session()
        self._schema = schemathesis.openapi.from_dict(dict(document))

    def operations(self) -> Iterator[Operation]:
        """Yield what the document describes; what it describes wrongly is an error."""
        for result in self._schema.get_all_operations():
            assert isinstance(result, Ok), result.err()
            operation = result.ok()
            if self._mode is GenerationMode.POSITIVE or _can_be_wrong(operation):
                yield operation

    def fuzz(self, operation: Operation, *, num_examples: int, seed_value: int) -> int:
        """Send examples and check every answer; return how many were sent."""
        count = 0

        @seed(seed_value)
        @settings(
            max_examples=num_examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=self._mode))
        def send(case: Case[Any]) -> None:
            nonlocal count
            count += 1
            reply = case.call(
                self._url, session=self._session, headers=self._headers, timeout=_TIMEOUT_S
            )
            case.validate_response(reply, checks=self._checks, headers=self._headers)

        send()
        return count

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


def _can_be_wrong(operation: Operation) -> bool:
    """Whether there is anything in a request that a mistake could be made in."""
    return bool(operation.body or operation.path_parameters or operation.query)
