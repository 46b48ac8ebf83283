"""README.md: its commands serve its deployment and a cache server, and its programs run against them.

Commands and programs run unchanged, except for ports, the path of the socket and the memory of the cache server.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.clone import lay_out, run_commands
from tests.support.document_code import code_about

DEPLOYMENT = code_about("README.md", "# deploy.yml")
SERVE = code_about("README.md", "kvtier serve deploy.yml")
CHAT = code_about("README.md", "OpenAI(")
CACHE_SERVER = code_about("README.md", "kvtier cache-server --memory")
STORE = code_about("README.md", "kvtier.connect")
_FILE = "cat > {} <<'END'\n{}END\n"


@pytest.fixture(autouse=True)
def _needs_bash() -> None:
    if shutil.which("bash") is None:
        pytest.skip("the document's commands need bash")


@pytest.mark.slow
def test_the_deployment_answers_an_openai_client(tmp_path: Path) -> None:
    lay_out(tmp_path)
    check, serve = SERVE.text.splitlines()

    said = run_commands(
        _FILE.format("deploy.yml", DEPLOYMENT.text + "\nhttp: {openai: 8080, ollama: 11434}\n")
        + _FILE.format("program.py", CHAT.text)
        + f"{check}\n{serve} 2> serve.log &\n"
        + 'python -m examples.ask "Thank you."\n'  # waits until the deployment is ready
        + "python program.py\nkill $!\nwait $! || true\n",
        tmp_path,
    )

    assert "it would start" in said
    assert said.endswith("A cache that computes every prompt prefix once and keeps it wherever there is room.")


def test_the_cache_server_returns_what_the_program_stored(tmp_path: Path) -> None:
    lay_out(tmp_path)
    socket = '"$XDG_RUNTIME_DIR/kvtier.sock"'
    server = CACHE_SERVER.text.strip().replace("20GiB", "1GiB").replace("/tmp/kvtier.sock", socket)

    said = run_commands(
        f"{server} 2> serve.log &\nwhile [ ! -S {socket} ]; do kill -0 $!; sleep 0.1; done\n"
        + _FILE.format("template.py", STORE.text)
        + 'sed "s|/tmp|$XDG_RUNTIME_DIR|" template.py > program.py\npython program.py\n',
        tmp_path,
    )

    assert "\n512 blocks; all\n" in said
