"""What encryption over TCP costs: the same blocks set and got in the clear, with a shared secret, and with TLS.

    python -m benchmarks.remote_kv_cache.test_encrypted [--quick] [--json FILE] [--model-shape NAME]

All on loopback, where only the processors limit the rate. TLS is measured if `openssl` is installed, which makes the
certificate.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import kvtier
from benchmarks.harness import BlockMemory, Contender, Result, console, parse_options, print_figures, print_table, race
from benchmarks.shapes import SHAPES
from kvtier import BlockHash, Namespace, block_hashes
from kvtier.client.client import CacheClient
from kvtier.testing.servers import cache_server

NAMESPACE = Namespace(bytes(range(32)))
_SECRET = "a secret for benchmarks"
_TOTAL_BYTES = 256 << 20


def _certificate(folder: Path) -> bool:
    if shutil.which("openssl") is None:
        return False
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(["openssl", "req", "-x509", *key, *files, "-days", "2", *names], check=True, capture_output=True)
    return True


def _contender(
    way: str, what: str, client: CacheClient, hashes: list[BlockHash], stored: BlockMemory, got: BlockMemory
) -> Contender:
    if what == "set":
        return Contender(way, lambda: client.set(hashes, stored.blocks), prepare=client.drop)
    return Contender(
        way,
        lambda: client.get(hashes, got.blocks),
        prepare=got.poison,
        check=lambda: got.expect(stored),
    )


def main() -> None:
    options = parse_options(__doc__ or "", ("Qwen2.5-7B", "Llama-3.1-8B"))
    result = Result("remote_kv_cache.test_encrypted", {"repeats": options.repeats, "quick": options.quick})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "secret").write_text(_SECRET)
        ways: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
            "clear": ((), {}),
            "secret": (("--tcp-secret-file", str(folder / "secret")), {"secret": _SECRET}),
        }
        if _certificate(folder):
            tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
            ways["TLS"] = (tls, {"ca_file": folder / "cert.pem"})
        for shape in options.shapes:
            layout = SHAPES[shape]
            console.print(shape)
            count = max(1, _TOTAL_BYTES // layout.block_bytes)
            hashes = block_hashes(NAMESPACE, [1] * (count * layout.block_tokens), layout.block_tokens)
            stored = BlockMemory(count, layout.block_bytes, seed=1)
            got = BlockMemory(count, layout.block_bytes)
            with contextlib.ExitStack() as servers:
                clients: dict[str, CacheClient] = {}
                for way, (server_options, client_options) in ways.items():
                    server = servers.enter_context(cache_server(*server_options, memory="1GiB", tcp=True))
                    clients[way] = servers.enter_context(
                        kvtier.connect(
                            server.tcp,
                            token=server.token,
                            layout=layout,
                            namespace=NAMESPACE,
                            timeout_s=60.0,
                            **client_options,
                        )
                    )

                for what in ("set", "get"):
                    seconds = race(
                        [_contender(way, what, clients[way], hashes, stored, got) for way in ways], options.repeats
                    )
                    row: dict[str, object] = {"shape": shape, "what": what}
                    row |= {f"{way} GB/s": round(stored.nbytes / seconds[way] / 1e9, 2) for way in ways}
                    result.rows.append(row)
                    for way in list(ways)[1:]:
                        result.figures[f"{what}_{way}_of_clear_{shape}"] = seconds["clear"] / seconds[way]
        print_table("blocks over TCP on loopback, medians", result.rows)
        print_figures(result.figures, {})
        result.write(options.json)


if __name__ == "__main__":
    main()
