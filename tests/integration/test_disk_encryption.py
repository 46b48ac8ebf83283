"""A cache server with a key: blocks survive a restart, lie on disk as ciphertext, and are of no use without the key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.cli.cache import cache
from kvtier.deploy.plan.deployment import load_plan
from kvtier.errors import ConfigError
from kvtier.testing.servers import cache_server
from tests.support.actors import chain, open_client, payloads, read_all
from tests.support.waiting import LIMIT_S

pytest.importorskip("cryptography")
_HASHES = chain(1, 8)


def _options(tmp_path: Path, *, key: bool) -> tuple[str, ...]:
    path = tmp_path / "key"
    if not path.exists():
        path.write_bytes(os.urandom(32))
    disk = ("--folder", str(tmp_path / "data"), "--disk", "8MiB", "--disk-only")
    return (*disk, "--encryption-key-file", str(path)) if key else disk


def started(*options: str) -> subprocess.CompletedProcess[str]:
    """A server that cannot start, with what it said."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "cache-server", "--memory", "8MiB", *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_blocks_are_back_with_the_key_and_kept_where_it_is_missing(tmp_path: Path) -> None:
    with cache_server(*_options(tmp_path, key=True)) as server, open_client(server.unix) as client:
        client.set(_HASHES, payloads(_HASHES))
        client.flush()
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "data").iterdir())
    assert not any(raw[:64] in on_disk for raw in payloads(_HASHES))
    done = CliRunner().invoke(cache, ["stat", "--folder", str(tmp_path / "data")])
    assert done.exit_code == 1
    assert f"the blocks in {tmp_path / 'data'} are encrypted: their server needs the key file" in done.output
    without = started(*_options(tmp_path, key=False))
    assert without.returncode == 1
    assert "are encrypted: their server needs the key file" in without.stderr
    with cache_server(*_options(tmp_path, key=True)) as server, open_client(server.unix) as client:
        assert read_all(client, _HASHES) == payloads(_HASHES)


def test_a_file_without_a_key_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    done = started(*_options(tmp_path, key=True))
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"Error: {tmp_path / 'key'} holds no encryption key: it has 32 bytes")


def test_a_deployment_names_its_key_file(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "key").write_bytes(os.urandom(32))
    path = tmp_path / "deploy.yml"
    path.write_text("models: [{model: tiny}]\ncache: {memory: 1MiB, folder: data, disk: 1GiB, key_file: key}\n")
    assert load_plan(path, Path("/run/kvtier")).caches[0].server.key_file == tmp_path / "key"
    path.write_text("models: [{model: tiny}]\ncache: {memory: 1MiB, folder: data, disk: 1GiB, key_file: none}\n")
    with pytest.raises(ConfigError, match=r"deploy.yml:2: key_file .*none does not exist"):
        load_plan(path, Path("/run/kvtier"))
    path.write_text("models: [{model: tiny}]\ncache: {memory: 1MiB, key_file: key}\n")
    with pytest.raises(ConfigError, match="key_file is about the disk"):
        load_plan(path, Path("/run/kvtier"))
