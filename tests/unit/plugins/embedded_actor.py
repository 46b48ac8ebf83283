"""A process that wants an embedded server: `python -m tests.unit.plugins.embedded_actor SETTINGS`, as JSON.

It says its server's address, or why there is none, in a line of JSON, and lives until its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedServer


def main() -> None:
    settings = json.loads(sys.argv[1])
    forks = settings.pop("forks", False)
    if "folder" in settings:
        settings["folder"] = Path(settings["folder"])
    os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)  # as an engine's own descriptors might be
    server = EmbeddedServer(**settings)
    try:
        server.ensure()
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    if forks and os.fork() == 0:
        sys.stdin.close()
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print(json.dumps({"address": server.address}), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
