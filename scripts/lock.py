"""Write requirements-lock.txt: the packages that `make` installs, with hashes of their Linux wheels (`make lock`).

Versions are those that pip resolves now; hashes are those of the index (default: PyPI), of all wheels for Linux,
so that the file is valid for both processors and for Python 3.11 and 3.12.

Not locked: torch and triton. They come from PyPI with CUDA, from a CPU index, or from a local build (`2.13.0+cpu`):
different files under one version, so no hash holds everywhere; constraints.txt has torch's version. Packages that
only torch needs (`nvidia-*`) follow torch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-lock.txt"
NOT_LOCKED = re.compile(r"kvtier|torch|triton|nvidia-.*|cuda-.*|setuptools")
_GROUPS = ("test", "check", "bench")
_EXTRAS = "engine,server,terminal,testing,vineyard,encryption"
_PYTHONS = re.compile(r"-(cp311|cp312|py3|py2\.py3)-|-cp3\d+-abi3-")
_PLATFORMS = re.compile(r"-any\.whl|linux.*(x86_64|aarch64)\.whl")
_HEAD = """\
# What `make` installs, with hashes of the wheels for Linux. Written by `make lock`; `make LOCKED=1` installs from it.
# Without torch and triton: the same version is another file on PyPI, on a CPU index and in a local build.
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved() -> dict[str, str]:
    """Versions by name, as pip would install them here."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        groups = [word for group in _GROUPS for word in ("--group", group)]
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", report.name, "-c", "constraints.txt", *groups, f".[{_EXTRAS}]"]
        subprocess.run(command, cwd=ROOT, check=True)
        installed = json.loads(Path(report.name).read_text())["install"]
    found = {canonical(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}
    return {name: version for name, version in sorted(found.items()) if not NOT_LOCKED.fullmatch(name)}


class _Links(HTMLParser):
    """The hrefs of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def hashes_of(name: str, version: str, page: str) -> list[str]:
    """Hashes of a version's wheels for Linux, from a page of an index."""
    links = _Links()
    links.feed(page)
    found = set()
    for link in links.found:
        path, _, fragment = link.partition("#sha256=")
        file = urllib.parse.unquote(path.rsplit("/", 1)[-1])
        known = canonical(file.split("-")[0]), file.split("-")[1:2]
        if known == (name, [version]) and _PYTHONS.search(file) and _PLATFORMS.search(file) and fragment:
            found.add(fragment)
    return sorted(found)


def locked(versions: dict[str, str], hashes: dict[str, list[str]]) -> str:
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes[name])])
        for name, version in versions.items()
    ]
    return _HEAD + "\n".join(lines) + "\n"


def direct_needs() -> set[str]:
    """Names in pyproject.toml that `make` installs and that are locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [project["project"]["optional-dependencies"][name] for name in _EXTRAS.split(",")]
    groups = [project["dependency-groups"][name] for name in _GROUPS]
    needs = [need for some in (project["project"]["dependencies"], *extras, *groups) for need in some]
    names = {canonical(re.split(r"[<>=!~\[; ]", need)[0]) for need in needs}
    return {name for name in names if not NOT_LOCKED.fullmatch(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="https://pypi.org/simple", help="where hashes come from")
    arguments = parser.parse_args()
    versions = resolved()
    hashes = {}
    for name, version in versions.items():
        try:
            with urllib.request.urlopen(f"{arguments.index}/{name}/", timeout=60) as reply:
                hashes[name] = hashes_of(name, version, reply.read().decode())
        except OSError as error:
            print(f"{arguments.index} cannot be reached, so nothing was locked: {error}", file=sys.stderr)
            return 1
        if not hashes[name]:
            print(f"{arguments.index} has no wheel for Linux of {name} {version}: nothing was locked", file=sys.stderr)
            return 1
        print(f"{name} {version}: {len(hashes[name])} wheels")
    LOCK.write_text(locked(versions, hashes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
