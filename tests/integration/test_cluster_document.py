"""docs/cluster.md: its commands make a cluster of three hosts that share blocks. The hosts are network namespaces.

Each block runs unchanged on the hosts that its first line names. Only the model and the cache server's memory are
replaced by smaller ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.errors import TierRefused, TierUnavailable
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.resp import Reply, ReplyError, command
from tests.support.document_code import code_about, code_in
from tests.support.namespaces import Host, network
from tests.support.serving import save_model
from tests.support.valkey import valkey_binary
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

pytestmark = pytest.mark.slow  # three deployments and a cluster

_HERE = {
    "model: Qwen/Qwen2.5-7B-Instruct": "model: tiny\n    kv_cache_space: 32MiB\n    always_load: true",
    "memory: 20GiB": "memory: 64MiB",
}


DEPLOYMENT = code_about("docs/cluster.md", "models:")
COMMANDS = code_in("docs/cluster.md", "bash")
"""One host or all of them run a block, as its first line says."""
BLOCKS = sorted([*COMMANDS, DEPLOYMENT], key=lambda code: code.line)


@dataclass(frozen=True)
class Machine:
    """One of the hosts, with the folder in which its commands are run."""

    host: Host
    folder: Path
    environment: dict[str, str]

    def run(self, commands: str) -> str:
        """The commands' output. Programs left running keep no pipe of ours. Raises `AssertionError` if one fails."""
        said = self.folder / "said"
        with said.open("wb") as out, self.host.entered():
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        assert done.returncode == 0, f"{commands}\n{said.read_text()}\n{self._logs()}"
        return said.read_text()

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three, with `valkey-server` and `kvtier` on their way."""
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("the document's commands need bash and curl")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(valkey_binary())
    (programs / "kvtier").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvtier "$@"\n')
    (programs / "kvtier").chmod(0o755)
    with contextlib.ExitStack() as stack:
        joined = stack.enter_context(network(3))
        made = []
        for host in joined.hosts:
            folder = tmp_path / host.name
            save_model(folder / "tiny")
            runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))  # short: it is a socket's path
            environment = {
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(Path(kvtier.__file__).parents[1]),
                "XDG_RUNTIME_DIR": runtime,
                "TMPDIR": runtime,
                "OMP_NUM_THREADS": "1",
                "no_proxy": "*",
            }
            made.append(Machine(host, folder, environment))
        stack.callback(joined.end_processes)  # before their folders go
        yield made


def test_the_commands_make_three_hosts_that_share_blocks(machines: list[Machine]) -> None:
    said: list[list[str]] = []
    for block in BLOCKS:
        if block == DEPLOYMENT:
            for machine in machines:
                (machine.folder / "deploy.yml").write_text(_here(block.text))
        elif block.head.startswith("# on every host"):
            in_turn = "one after the other" in block.head
            with ThreadPoolExecutor(1 if in_turn else len(machines)) as threads:
                said.append(list(threads.map(lambda machine, text=block.text: _run(machine, text), machines)))
        else:
            assert block.head.startswith("# on one host"), f"{block.place} does not say where to run it"
            said.append([machines[0].run(block.text)])
            if (machines[0].folder / "secrets").exists() and not (machines[1].folder / "secrets").exists():
                _copy_secrets(machines)

    assert said[2] == ["a cluster of 3 nodes, all slots served\n"]
    assert all("it would start" in report and "note: cluster" not in report for report in said[3])
    first, *others = [json.loads(answer) for answer in said[4]]
    assert cached(first).get("cluster", 0) == 0
    for other in others:
        assert other["choices"][0]["text"] == first["choices"][0]["text"]
        assert cached(other)["cluster"] == (first["usage"]["prompt_tokens"] - 1) // 16 * 16


def _run(machine: Machine, text: str) -> str:
    """The commands' output. Blocks of a prompt are written in the background; afterwards they are in the cluster."""
    said = machine.run(text)
    if "/v1/completions" in text:
        answer = json.loads(said)
        num_computed = (answer["usage"]["prompt_tokens"] - 1 - sum(cached(answer).values())) // 16
        wait_until(lambda: int(machine.run(f"{sys.executable} -c '{_COUNT_WRITTEN}'")) >= num_computed)
    return said


_COUNT_WRITTEN = """
import kvtier
from kvtier.deploy.run.served_caches import find_caches
[cache] = find_caches()
with kvtier.connect(cache.address) as client:
    print(client.stats()["cluster_written_blocks"])
"""


def _here(text: str) -> str:
    for theirs, ours in _HERE.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


def _copy_secrets(machines: list[Machine]) -> None:
    """Ask as the document does."""
    for machine in machines[1:]:
        shutil.copytree(machines[0].folder / "secrets", machine.folder / "secrets")


def cached(answer: Any) -> dict[str, int]:
    """Tokens by tier."""
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return found


def test_the_user_for_kvtier_may_do_what_is_listed_and_no_more(machines: list[Machine]) -> None:
    """Other keys and other commands are refused, and so are clients without a password."""
    secrets, node, *_ = COMMANDS
    one = machines[0]
    one.run(secrets.text)
    one.run(node.text)
    password = (one.folder / "secrets/valkey-kvtier").read_text().strip()
    user = NodeAccess("kvtier", password, plaintext=True)
    with one.host.entered():
        wait_until(lambda: answers(one, user))
        for words in ("SET other 1", "FLUSHALL", "CONFIG SET maxmemory 0", "KEYS *", "ACL LIST", "CLUSTER NODES"):
            reply = call(one, user, words)
            assert isinstance(reply, ReplyError)
            assert reply.code == "NOPERM", words
        assert call(one, user, "CONFIG GET maxmemory") == [b"maxmemory", b"%d" % (64 << 30)]
        for other in (NodeAccess(plaintext=True), NodeAccess("operator", password, plaintext=True)):
            with pytest.raises(TierRefused, match=r"NOAUTH|WRONGPASS"):
                call(one, other, "PING")


def answers(machine: Machine, access: NodeAccess) -> bool:
    """The node that was started listens by now."""
    try:
        return call(machine, access, "PING") is not None
    except TierUnavailable:
        return False


def call(machine: Machine, access: NodeAccess, words: str) -> Reply:
    deadline = time.monotonic() + CALL_S
    address = NodeAddress(machine.host.address, 6379)
    with contextlib.closing(NodeConnection(address, access, deadline)) as connection:
        return connection.call(command(*words.encode().split()), deadline)
