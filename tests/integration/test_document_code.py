"""All code in the project's documents is run, or checked as far as possible: a block that nothing covers fails.

The tests in `RUN` run their blocks unchanged. Here, files are read by the code that reads them, and the options of
commands that would need a machine of their own are parsed. `NOT_RUN` names the rest, with the reason.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import click
import msgspec
import pytest
import yaml

from kvtier.cacheserver.tenants import TenantSection
from kvtier.cli.main import main
from kvtier.deploy.plan.deployment import load_plan
from kvtier.simulate.trace import read_traces
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.retention import RetentionOutcome
from tests.compat import test_readme as test_api_commands
from tests.integration import (
    test_cluster_document,
    test_prefixes_document,
    test_quickstart,
    test_readme,
    test_readme_commands,
)
from tests.support.document_code import ROOT, Code, all_code, code_about

RUN = [
    *(test_readme_commands.DEPLOYMENT, test_readme_commands.SERVE, test_readme_commands.CHAT),
    *(test_readme_commands.CACHE_SERVER, test_readme_commands.STORE),
    *(test_readme.PROGRAM, test_readme.TIERS),
    *test_quickstart.COMMANDS,
    *test_cluster_document.BLOCKS,
    *test_prefixes_document.COMMANDS,
    *test_api_commands.COMMANDS,
]
"""Blocks that other tests run."""

NOT_RUN = {
    (
        "README.md",
        "make demo",
    ): "the tests run in what `make` installs; tests/integration/test_demo_model.py asks the model",
    ("docs/quickstart.md", "make install"): "the tests run in what it installs",
    ("docs/operations.md", "# both containers: -v /run/kvtier:/run/kvtier --user 1000 --pid=container:cache"): (
        "options of a container engine, which test machines do not have"
    ),
    ("docs/protocol.md", "client: Hello(holder, nonce) ────────────────────────────────▶ server"): (
        "a picture; tests/unit/wire checks the messages"
    ),
    (
        "docs/troubleshooting.md",
        "The prompt parts from an earlier prompt of its session at token 1843, in its answer:",
    ): "output of a command; tests/integration/test_parting.py checks such sentences",
    (
        "docs/mooncake.md",
        "pip install '.[mooncake]'",
    ): "needs the network and root; `make test-mooncake` runs the master",
    ("docs/operations.md", "pip install '.[tracing]'"): "needs the network, and a collector of traces",
    ("docs/planning.md", "+192GiB of memory"): "output of a command; tests/unit/planning checks such sentences",
    ("benchmarks/peers/README.md", "unshare "): "needs the peers, and root",
    ("benchmarks/peers/README.md", "pip install -r "): "needs the network and root",
    ("benchmarks/peers/README.md", "python -m venv lmcache-venv"): "needs the network",
}
"""By document and first line."""

_COMMANDS = ("kvtier", ".venv/bin/kvtier", "python", ".venv/bin/python", "make", "pip", "cc", "vllm")
_SERVICE = code_about("docs/operations.md", "[Service]")
_RETENTION = code_about("docs/api.md", '"retention": [{')
_TRACE = code_about("docs/planning.md", '"hash_ids"')
_SCRAPES = code_about("docs/grafana/README.md", "scrape_configs:")
_CHECKED = (_SERVICE, _RETENTION, _TRACE, _SCRAPES)
_PYPI = re.compile(r"pip install '?kvtier")


def _is_command(code: Code) -> bool:
    return code.language in ("", "sh") and code.head.partition(" ")[0] in _COMMANDS


def _reason(code: Code) -> str | None:
    """Why the block is not run, or None."""
    return next(
        (why for (name, head), why in NOT_RUN.items() if name == code.document and code.head.startswith(head)), None
    )


def test_every_block_of_code_is_run_checked_or_named_with_a_reason() -> None:
    uncovered = [
        f"{code.place}: {code.head}"
        for code in all_code()
        if _reason(code) is None
        and code not in RUN
        and not _is_command(code)
        and code.language not in ("yaml", "toml", *_COMPILERS)
        and code not in _CHECKED
    ]

    assert not uncovered, "run them in a test, or add them to NOT_RUN with a reason"


@pytest.mark.parametrize(("document", "head"), NOT_RUN)
def test_each_entry_of_not_run_names_one_block(document: str, head: str) -> None:
    (code,) = (code for code in all_code() if code.document == document and code.head.startswith(head))

    assert code not in RUN


# -- Commands --------------------------------------------------------------------------------------------------------

_COMMAND_BLOCKS = [code for code in all_code() if _is_command(code) and code not in RUN and _reason(code) is None]


@pytest.mark.parametrize("code", _COMMAND_BLOCKS, ids=lambda code: code.place)
def test_commands_have_the_options_that_documents_give_them(
    code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = code.text.replace("\\\n", " ")
    assert not _PYPI.search(text), "kvtier is not on PyPI: install the clone"
    for words in _words(text):
        _check_command(words)


def _words(text: str) -> list[list[str]]:
    """The words of each command. A quoted argument may go over several lines."""
    commands: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.count("'") % 2:
            pending += "\n"
            continue
        for command in pending.split(" && "):
            commands.append(shlex.split(command, comments=True))
        pending = ""
    return [command for command in commands if command]


_EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def _check_command(words: list[str]) -> None:
    match words:
        case ["kvtier" | ".venv/bin/kvtier", *arguments]:
            _parse(main, arguments)
        case ["python" | ".venv/bin/python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, module
        case ["python", script, *_]:
            assert (ROOT / script).exists(), script
        case ["make", "-C", folder, target, *_]:
            assert f"\n{target}:" in (ROOT / folder / "Makefile").read_text(), target
        case ["make", target, *_]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
        case ["vllm", "serve", _, *options]:
            _check_transfer_config(options[options.index("--kv-transfer-config") + 1])
        case ["pip", "install", what]:
            assert (found := re.fullmatch(r"\.(?:\[([a-z,]+)\])?", what)), what
            assert set(filter(None, (found[1] or "").split(","))) <= _EXTRAS
        case ["cc", *_]:
            pass  # tests/clients/test_install.py compiles a program with what pkg-config says
        case _:
            raise AssertionError(f"nothing checks {words}")


def _parse(command: click.Command, arguments: list[str]) -> None:
    """All options must exist, and have values of their kind. Files that are named are made first."""
    for word in arguments:
        if re.fullmatch(
            r"([\w-]+/)?[\w*-]+\.(yml|toml|pem|key|jsonl\.gz|kvpack|txt|md)|secrets/[\w-]+|secret|token|key", word
        ):
            Path(word).parent.mkdir(exist_ok=True)
            Path(word).touch()
    name = "kvtier"
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        name, arguments = arguments[0], arguments[1:]
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command = found
    command.make_context(name, list(arguments))


def _vllm_settings() -> ModuleType:
    """The plug-in's settings without the plug-in, whose package imports vLLM."""
    spec = importlib.util.spec_from_file_location("vllm_settings", ROOT / "src/kvtier/plugins/vllm/settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where msgspec looks for the names in its annotations
    spec.loader.exec_module(module)
    return module


def _check_transfer_config(text: str) -> None:
    config = json.loads(text)
    settings = _vllm_settings()
    extra = config["kv_connector_extra_config"]
    if config["kv_connector"] == "KvtierConnector":
        settings.read_settings(extra)
    else:
        for tier in extra["secondary_tiers"]:
            settings.read_tier_settings(
                {name: value for name, value in tier.items() if name not in ("type", "module_path")}
            )


# -- Files -----------------------------------------------------------------------------------------------------------

_FILES = [code for code in all_code() if code.language in ("yaml", "toml") and code not in (*RUN, *_CHECKED)]
_SMALLER = {r"\d+GiB": "64MiB", r"/var/cache/kvtier": "cache", r"~/.cache/kvtier/[\w-]+": "cache"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, "qwen2", with_tokenizer=True)
    return folder


@pytest.mark.parametrize("code", _FILES, ids=lambda code: code.place)
def test_files_are_understood_by_what_reads_them(code: Code, tmp_path: Path, tiny_model: Path) -> None:
    if code.language == "toml":
        sections = tomllib.loads(code.text)
        msgspec.convert(sections, dict[str, TenantSection])
        return
    text = code.text
    if code.head in ("cache:", "page:", "warm:"):  # the part of a file that the page is about
        cache = "" if code.head == "cache:" else "cache: {memory: 64MiB}\n"
        text = f"models:\n  - model: tiny\n{cache}{text}"
    (tmp_path / "tiny").symlink_to(tiny_model)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for hub_name in re.findall(r"model: \"?([\w.-]+/[\w.-]+)", text):
        text = text.replace(hub_name, "tiny")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/valkey-kvtier").write_text("secret")
    for name in ("agents.key", "batch.key", "prompt.txt", "docs/handbook.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "deploy.yml").write_text(_on_this_machine(text, tmp_path))

    assert load_plan(tmp_path / "deploy.yml", tmp_path).engines


def _on_this_machine(text: str, folder: Path) -> str:
    """Less memory, no GPU, and secrets that are there."""
    for pattern, ours in _SMALLER.items():
        text = re.sub(pattern, ours, text)
    key = folder / "alice"
    key.write_text("secret")
    text = text.replace("/run/secrets/alice", str(key)).replace("/opt/vllm/bin/python", sys.executable)
    document = yaml.safe_load(text)
    for model in document.get("models", []):
        if "devices" in model:
            model["devices"] = ["cpu"] * len(model["devices"])
    return yaml.safe_dump(document)


# -- Other formats ---------------------------------------------------------------------------------------------------


def test_the_unit_of_systemd_starts_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(_SERVICE.text)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    (tmp_path / "deploy.yml").touch()

    assert program.endswith("/bin/kvtier")
    _parse(main, [word.replace("/etc/kvtier", str(tmp_path)) for word in arguments])


def test_the_answer_about_retention_has_the_fields_that_apis_show() -> None:
    (shown,) = json.loads(f"{{{_RETENTION.text}}}")["retention"]
    asked, granted = shown["asked"], shown["granted"]
    outcome = RetentionOutcome(
        asked_tokens=asked["tokens"],
        asked_ttl_s=asked["ttl_s"],
        priority=asked["priority"],
        granted_tokens=granted["tokens"],
        granted_ttl_s=granted["ttl_s"],
        tier=granted["tier"],
        reason=shown["reason"],
    )

    assert outcome.shown() == shown


def test_the_line_of_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(_TRACE.text)

    (request,) = read_traces(file)

    assert request.hashes == (0, 1, 2)


def test_prometheus_is_given_one_job_for_each_port() -> None:
    jobs = yaml.safe_load(_SCRAPES.text)["scrape_configs"]

    assert [job["static_configs"][0]["targets"] for job in jobs] == [["127.0.0.1:8080"], ["127.0.0.1:9400"]]


# -- C and C++ -------------------------------------------------------------------------------------------------------

_AROUND = {
    "c": """
#include <stdio.h>
#include <kvtier.h>
void program(const uint8_t *namespace_id, kvt_namespace_fields fields, const uint32_t *tokens, size_t num_tokens,
             uint8_t *hashes, const void **views) {
""",
    "cpp": """
#include <kvtier.hpp>
void program(std::size_t tensor_bytes, std::size_t capacity, std::size_t layers, const std::vector<int>& prefix,
             const std::vector<int>& tokens, const std::vector<kvtier::TokenTensors>& kv,
             std::vector<kvtier::TokenTensors>& found) {
""",
}
_COMPILERS = {"c": ("cc", "-std=c99", "-xc"), "cpp": ("c++", "-std=c++17", "-xc++")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [code for code in all_code() if code.language in _COMPILERS], ids=lambda code: code.place
)
def test_programs_in_c_compile(code: Code) -> None:
    compiler, *options = _COMPILERS[code.language]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    done = subprocess.run(
        [compiler, *options, "-fsyntax-only", "-I", str(ROOT / "clients/c/include"), "-"],
        input=f"{_AROUND[code.language]}{code.text}}}\n",
        text=True,
        capture_output=True,
    )

    assert done.returncode == 0, done.stderr
