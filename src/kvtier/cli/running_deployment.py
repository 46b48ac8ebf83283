"""A running deployment, accessed over HTTP by commands: found by its file, by its URL, or as the only one."""

from __future__ import annotations

import contextlib
import functools
import http.client
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import click
import msgspec

from kvtier.api.config import ApiKey
from kvtier.api.prefixes.record import NAME_IN_WORDS, is_name
from kvtier.cli.cache_server import read_token
from kvtier.deploy.plan.deployment import load_plan
from kvtier.deploy.plan.parts import DeploymentPlan
from kvtier.deploy.run.served_caches import find_deployments
from kvtier.deploy.run.summary import urls_of
from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

PREFIXES = "/kvtier/v1/prefixes"
_TIMEOUT_S = 600.0
_MAX_ANSWER_BYTES = 256 << 20
_MAX_EVENT_BYTES = 1 << 20
_LONGEST = 2000
_RUNTIME_FOLDER = Path("RUNTIME")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)

Document = dict[str, Any]

api_key_option = click.option(
    "--api-key-file", type=_FILE, help="File with an API key that has admin: true, for --url."
)
url_option = click.option("--url", default=None, help="Its OpenAI API, such as http://host:8080.")


@dataclass(frozen=True, slots=True)
class Running:
    """Its OpenAI API, a key that may change the cache, if there are keys, and its certificate."""

    url: str
    key: str | None = None
    certificate: Path | None = None

    def get(self, path: str) -> Document:
        """Raises `ConfigError` with the server's own sentence."""
        with self._asked("GET", path, None) as response:
            return _document(response)

    def post(self, path: str, body: Document | None = None) -> Document:
        """Like `get`."""
        with self._asked("POST", path, body or {}) as response:
            return _document(response)

    def events(self, path: str, body: Document) -> Iterator[Document]:
        """The events of a stream as they arrive. Raises `ConfigError` as `get` does."""
        with self._asked("POST", path, body) as response:
            while line := response.readline(_MAX_EVENT_BYTES):
                if line.startswith(b"data: "):
                    document = _decoded(line.removeprefix(b"data: "))
                    if "error" in document:
                        raise ConfigError(_sentence(document))
                    yield document

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: Document | None) -> Iterator[http.client.HTTPResponse]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        data = None if body is None else msgspec.json.encode(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ConfigError(_sentence(_document(response)))
                yield response
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConfigError(f"{self.url} does not answer: {reason}") from error

    def _connection(self) -> http.client.HTTPConnection:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:  # an odd port or IPv6 address
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"{printable(self.url)} is not a URL such as http://127.0.0.1:8080")
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port or 80, timeout=_TIMEOUT_S)
        context = ssl.create_default_context()
        if self.certificate is not None:  # the deployment's own file names it, so it is trusted, whatever its host
            context = ssl.create_default_context(cafile=str(self.certificate))
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return http.client.HTTPSConnection(host, port or 443, timeout=_TIMEOUT_S, context=context)


def running_of(file: Path) -> Running:
    """The deployment of `file`: as it was started, or at the address in the file. Raises `ConfigError`."""
    plan = load_plan(file, _RUNTIME_FOLDER)
    url = find_deployments().get(str(file.absolute()))
    if url is None:
        url = urls_of(plan, [one.port for one in plan.http.listeners]).get("openai")
    if url is None or url.endswith(":0"):
        raise ConfigError(f"{file} is not running here, or serves no OpenAI API")
    return Running(url, _admin_key(plan, file), plan.http.api.tls_certificate)


def running_at(url: str, api_key_file: Path | None) -> Running:
    """One that may be on another host. Raises `ConfigError` for a key that cannot be read."""
    given = read_token(api_key_file)
    key = None if given is None else given.decode("ascii", errors="replace")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{api_key_file} holds no API key: it must be one line of ASCII")
    return Running(url.rstrip("/"), key)


def the_running() -> Running:
    """The only running deployment of this user. Raises `ConfigError` for none or several."""
    found = find_deployments()
    if len(found) != 1:
        files = ", ".join(map(printable, sorted(found)))
        raise ConfigError(
            f"several deployments run here: say which with --deployment ({files})"
            if found
            else "no deployment of yours runs here: start one with kvtier serve, or give --url"
        )
    return running_of(Path(next(iter(found))))


def deployment_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--deployment`, `--url` and `--api-key-file`; the command gets a function that finds it as `find`."""

    @functools.wraps(command)
    def collected(deployment: Path | None, url: str | None, api_key_file: Path | None, **given: Any) -> Any:
        def find() -> Running:
            if url is not None:
                return running_at(url, api_key_file)
            return the_running() if deployment is None else running_of(deployment)

        with one_sentence():
            return command(find=find, **given)

    for option in (
        api_key_option,
        url_option,
        click.option("--deployment", type=_FILE, help="The running deployment's file.  [default: the only one]"),
    ):
        collected = option(collected)
    return collected


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turns errors into one sentence for users."""
    try:
        yield
    except ConfigError as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error


def path_of(name: str, act: str = "") -> str:
    """Raises `ConfigError` for a name that no prefix can have."""
    if not is_name(name):
        raise ConfigError(f"no prefix is called {printable(name)!r}: a name has {NAME_IN_WORDS}")
    return f"{PREFIXES}/{quote(name, safe='')}{f'/{act}' if act else ''}"


def _admin_key(plan: DeploymentPlan, file: Path) -> str | None:
    keys: tuple[ApiKey, ...] = plan.http.api.keys
    if not keys:
        return None
    found = next((key.key for key in keys if key.admin), None)
    if found is None:
        raise ConfigError(f"no API key of {file} may change what is cached: give one admin: true")
    return found


def _document(response: http.client.HTTPResponse) -> Document:
    data = response.read(_MAX_ANSWER_BYTES + 1)
    if len(data) > _MAX_ANSWER_BYTES:
        raise ConfigError("the server's answer is too long")
    return _decoded(data)


def _decoded(data: bytes) -> Document:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError("the server's answer is not JSON: is it kvtier's OpenAI API?") from error


def _sentence(document: Document) -> str:
    error = document.get("error")
    message = error.get("message") if isinstance(error, dict) else error  # Ollama's form is a text
    return message if isinstance(message, str) else "the server refuses, and does not say why"
