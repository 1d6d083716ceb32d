"""Hugging Face ids, against a local server that speaks the hub's routes for models and files."""

from __future__ import annotations

import json
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from lora_weights import AdapterNotFoundError, SourceError, inspect_adapter, load_adapter
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FileServer, Request

MODULES = llama_modules()
WEIGHTS = "adapter_model.safetensors"
REPO = "org/sql-adapter"
COMMITS = {"main": "a" * 40, "v1": "b" * 40, "refs/pr/3": "c" * 40}


@pytest.fixture
def hub(server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FileServer:
    """A hub with one repository of three revisions; each commit has an adapter of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for seed, commit in enumerate(COMMITS.values()):
        folder = write_adapter(tmp_path / commit, MODULES, seed=seed)
        (folder / "tokenizer.json").write_text("{}")
        server.put_folder(folder, f"/{REPO}/resolve/{commit}")
    server.put_folder(
        write_adapter(tmp_path / "deep", MODULES, seed=9), f"/{REPO}/resolve/{'a' * 40}/deep"
    )
    server.routes.append(_models(server))
    return server


def _models(server: FileServer) -> Any:
    """Return a route that answers as ``/api/models`` does."""

    def answer(handler: Any, request: Request) -> bool:
        if not request.path.startswith("/api/models/"):
            return False
        if server.refusal(request) is not None:
            return False
        repo, _, revision = request.path.removeprefix("/api/models/").partition("/revision/")
        commit = COMMITS.get(revision or "main")
        if repo != REPO or commit is None:
            code = "RepoNotFound" if repo != REPO else "RevisionNotFound"
            handler.answer(request, 404, {"X-Error-Code": code})
            return True
        prefix = f"/{REPO}/resolve/{commit}/"
        names = [p.removeprefix(prefix) for p in server.files if p.startswith(prefix)]
        body = {"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
        headers = {"Content-Type": "application/json"}
        handler.answer(request, 200, headers, json.dumps(body).encode())
        return True

    return answer


def arguments(hub: FileServer, tmp_path: Path, **options: object) -> dict[str, Any]:
    return {
        "cache_dir": tmp_path / "cache",
        "storage_options": {"endpoint": hub.url, "token": False, **options},
    }


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        (REPO, "a" * 40),
        (f"hf://{REPO}", "a" * 40),
        (f"{REPO}@v1", "b" * 40),
        (f"hf://{REPO}@v1", "b" * 40),
        (f"{REPO}@refs/pr/3", "c" * 40),
        (f"hf://{REPO}/deep", "deep"),
    ],
)
def test_a_revision_gives_its_adapter(
    hub: FileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    adapter = load_adapter(source, **arguments(hub, tmp_path))

    commit = "a" * 40 if folder == "deep" else folder
    assert adapter.digest == load_adapter(tmp_path / folder).digest
    assert adapter.source == f"hf://{REPO}@{commit}" + ("/deep" if folder == "deep" else "")
    fetched = {r.path.rpartition("/")[2] for r in hub.requests if "/resolve/" in r.path}
    assert fetched == {"adapter_config.json", WEIGHTS}


def test_a_second_load_is_served_from_the_cache(hub: FileServer, tmp_path: Path) -> None:
    load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path))
    hub.requests.clear()

    load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path))

    assert [r.status for r in hub.requests if "/resolve/" in r.path] == [304, 304]


def test_headers_alone_are_fetched_for_a_report_without_numbers(
    hub: FileServer, tmp_path: Path
) -> None:
    report = inspect_adapter(f"hf://{REPO}", read_tensors=False, **arguments(hub, tmp_path))

    assert report.problems == ()
    assert report.num_tensors == 2 * len(MODULES)
    assert "tokenizer.json" in "".join(report.warnings)


@pytest.mark.parametrize("source", ["hf://org/nothing", f"hf://{REPO}@no-such-tag"])
def test_an_unknown_repository_or_revision_is_not_found(
    hub: FileServer, tmp_path: Path, source: str
) -> None:
    with pytest.raises(AdapterNotFoundError, match="has no repository") as caught:
        load_adapter(source, **arguments(hub, tmp_path))

    assert isinstance(caught.value.__cause__, HfHubHTTPError)


def test_c05_a_repository_without_an_adapter_at_its_top_names_the_folders_that_have_one(
    hub: FileServer, tmp_path: Path
) -> None:
    del hub.files[f"/{REPO}/resolve/{'a' * 40}/adapter_config.json"]

    with pytest.raises(AdapterNotFoundError, match="in the sub-folder deep"):
        load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path))


def test_a_token_is_sent_and_never_shown(hub: FileServer, tmp_path: Path) -> None:
    right, wrong = "hf_t0k3n", "hf_wr0ng"
    hub.authorization = f"Bearer {right}"

    load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path, token=right))
    with pytest.raises((AdapterNotFoundError, SourceError)) as caught:
        load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path, token=wrong))

    # The lines of this test are part of a traceback; they name the variable.
    assert wrong not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_hub_is_no_missing_adapter(hub: FileServer, tmp_path: Path) -> None:
    hub.statuses[f"/{REPO}/resolve/{'a' * 40}/{WEIGHTS}"] = 500

    with pytest.raises(SourceError, match="HTTP 500"):
        load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path))


def test_a_limit_holds_for_the_hub_too(hub: FileServer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"at most 5000 \(max_bytes\)"):
        load_adapter(f"hf://{REPO}", max_bytes=5000, **arguments(hub, tmp_path))


def test_offline_the_hubs_own_cache_is_read_and_nothing_is_asked(
    hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache = tmp_path / "hub-cache"
    snapshot = hub_cache / "models--org--sql-adapter" / "snapshots" / ("a" * 40)
    write_adapter(snapshot, MODULES)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))

    adapter = load_adapter(f"hf://{REPO}")
    with pytest.raises(AdapterNotFoundError, match="offline"):
        load_adapter("hf://org/nothing")

    assert adapter.digest == load_adapter(snapshot).digest
    assert hub.requests == []


def test_options_the_hub_does_not_have_are_named(hub: FileServer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="headers"):
        load_adapter(f"hf://{REPO}", **arguments(hub, tmp_path, headers={}))
