"""Models by name, from a small hub of our own on loopback, spoken to by the hub's real client."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest

from kvtier.errors import ConfigError
from kvtier.models.hub import find_model_folder, hub_problem
from tests.support.waiting import LIMIT_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"\x00" * 1000,
    "consolidated.safetensors": b"\x01" * 1000,
    "pytorch_model.bin": b"\x02" * 1000,
    "original/params.json": b"{}",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `team/tiny`, with one branch, `main`; `team/closed` is gated; `team/cut` breaks off its files."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        path = self.path.partition("?")[0]
        model = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if model == "team/closed":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif model not in ("team/tiny", "team/cut"):
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path in (f"/api/models/{model}/revision/main", f"/api/models/{model}"):
            self._json({"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path == f"/api/models/{model}/tree/{COMMIT}":
            self._json([_entry(name, data) for name, data in FILES.items()])
        elif path.startswith(f"/{model}/resolve/{COMMIT}/"):
            self._file(FILES[path.removeprefix(f"/{model}/resolve/{COMMIT}/")], is_cut=model == "team/cut")
        else:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, data: bytes, *, is_cut: bool) -> None:
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
        self._answer(200, data[: len(data) // 2] if is_cut else data, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}


@pytest.fixture
def endpoint() -> Iterator[str]:
    Hub.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="hub")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            huggingface_hub.close_session()


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_model_folder(str(tmp_path)) == tmp_path
    assert find_model_folder(tmp_path) == tmp_path


def test_a_name_is_downloaded_without_what_is_not_needed(endpoint: str, tmp_path: Path) -> None:
    folder = find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint)

    assert folder.is_relative_to(tmp_path)
    assert names_in(folder) == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_what_the_hub_says_of_a_name_is_known_without_a_download(endpoint: str) -> None:
    assert hub_problem("team/tiny", endpoint=endpoint) == ""
    assert hub_problem("team/none", endpoint=endpoint) == (
        "there is no folder team/none and no public model of that name on the hub"
    )
    assert hub_problem("team/tiny", revision="v9", endpoint=endpoint) == "the model team/tiny has no revision v9"
    assert "set HF_TOKEN" in hub_problem("team/closed", endpoint=endpoint)
    assert not any("resolve" in path for path in Hub.seen)


def test_a_hub_that_cannot_be_reached_tells_nothing_of_a_name() -> None:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        problem = hub_problem("team/tiny", endpoint=f"http://127.0.0.1:{bound.getsockname()[1]}")
    huggingface_hub.close_session()

    assert problem == (
        "team/tiny is not on this machine, and the hub is off or out of reach: whether there is such a model cannot be "
        "told now"
    )


@pytest.mark.parametrize("name", ["tiny.gguf", "./a/tiny.Q4_K_M.gguf", "owner/tiny.GGUF"])
def test_gguf_has_a_sentence_of_its_own(name: str) -> None:
    with pytest.raises(ConfigError, match="is GGUF, which is not read here"):
        find_model_folder(name)


def test_without_weights_only_small_files_come(endpoint: str, tmp_path: Path) -> None:
    folder = find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint, has_weights=False)

    assert names_in(folder) == {"config.json", "tokenizer.json", "chat_template.jinja"}


def test_a_cached_model_is_not_downloaded_again(endpoint: str, tmp_path: Path) -> None:
    first = find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint)
    Hub.seen.clear()

    assert find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint) == first
    assert not any("/resolve/" in path for path in Hub.seen)


def test_a_revision_may_be_asked_for(endpoint: str, tmp_path: Path) -> None:
    by_branch = find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint, revision="main")
    by_commit = find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint, revision=COMMIT)

    assert by_branch == by_commit
    with pytest.raises(ConfigError, match="the model team/tiny has no revision v9"):
        find_model_folder("team/tiny", cache_dir=tmp_path, endpoint=endpoint, revision="v9")


def test_an_unknown_or_closed_model_is_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder team/none and no public model of that name on the hub"):
        find_model_folder("team/none", cache_dir=tmp_path, endpoint=endpoint)
    with pytest.raises(ConfigError, match="the model team/closed may only be downloaded by those it was granted to"):
        find_model_folder("team/closed", cache_dir=tmp_path, endpoint=endpoint)


def test_a_download_that_breaks_off_is_told(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model team/cut cannot be downloaded: "):
        find_model_folder("team/cut", cache_dir=tmp_path, endpoint=endpoint, has_weights=False)


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "~/none-of-this", "none", "a/b/c"])
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no model folder {model}"):
        find_model_folder(model)


def test_a_name_that_no_hub_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"te am/ti\*ny is neither a folder nor a name on the hub"):
        find_model_folder("te am/ti*ny")


def test_the_clients_own_settings_hold(endpoint: str, tmp_path: Path) -> None:
    code = "import sys; from kvtier.models.hub import find_model_folder; print(find_model_folder(sys.argv[1]))"

    def run(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, model],
            env={**os.environ, "HF_HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    online = run("team/tiny", HF_ENDPOINT=endpoint)
    offline = run("team/tiny", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    unknown = run("team/other", HF_HUB_OFFLINE="1")

    assert online.returncode == 0, online.stderr
    assert online.stderr == ""
    assert Path(online.stdout.strip()).is_relative_to(tmp_path)
    assert offline.stdout == online.stdout
    assert "team/other, and the model is not in the cache while the hub is off or out of reach" in unknown.stderr
