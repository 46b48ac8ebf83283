"""Check the versions in requirements-lock.txt for known vulnerabilities with pip-audit: `make audit`.

It needs a network. pip-audit has an environment of its own, removed afterwards: it must not
change the packages that it checks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements-lock.txt"
_ADVISORIES = "https://pypi.org/pypi/pip/json"


def main() -> int:
    try:
        with urllib.request.urlopen(_ADVISORIES, timeout=20):
            pass
    except OSError as error:
        print(f"nothing was audited: {_ADVISORIES} cannot be reached ({error})", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvtier-audit-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-P", "-m", "pip", "install", "--quiet", "pip-audit>=2.9"], check=True)
        command = [python, "-P", "-m", "pip_audit", "--strict", "--require-hashes", "--disable-pip"]
        # Strict: a version without an audit result must not look audited.
        return subprocess.run([*command, "-r", str(LOCK)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
