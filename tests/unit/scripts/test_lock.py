"""The lock file: what an index page says of a version, and that the file in the repository is whole."""

from __future__ import annotations

import re

from scripts.lock import LOCK, direct_needs, hashes_of, locked

_PAGE = """
<a href="https://files/x/some_thing-1.0-cp311-cp311-manylinux_2_17_x86_64.whl#sha256=aa" data-x="1">1</a>
<a href="https://files/x/some_thing-1.0-cp38-abi3-manylinux_2_17_aarch64.whl#sha256=bb">2</a>
<a href="https://files/x/some_thing-1.0-cp311-cp311-win_amd64.whl#sha256=cc">3</a>
<a href="https://files/x/some_thing-1.0.1-py3-none-any.whl#sha256=dd">4</a>
<a href="https://files/x/some_thing-1.0.tar.gz#sha256=ee">5</a>
<a href="https://files/x/some_thing-1.0-py3-none-any.whl">6</a>
"""


def test_the_wheels_of_a_version_for_linux_are_found() -> None:
    assert hashes_of("some-thing", "1.0", _PAGE) == ["aa", "bb"]
    assert hashes_of("some-thing", "1.0.1", _PAGE) == ["dd"]
    assert hashes_of("other", "1.0", _PAGE) == []


def test_every_line_has_its_hashes() -> None:
    text = locked({"a": "1", "b": "2"}, {"a": ["x", "y"], "b": ["z"]})
    assert "a==1 \\\n    --hash=sha256:x \\\n    --hash=sha256:y\nb==2 \\\n    --hash=sha256:z\n" in text


def test_the_lock_has_all_that_is_asked_for_by_name_and_no_torch() -> None:
    text = LOCK.read_text()
    pinned = re.findall(r"^([a-z0-9-]+)==\S+ \\$", text, re.MULTILINE)
    assert direct_needs() <= set(pinned)
    assert not {"torch", "triton", "kvtier"} & set(pinned)
    assert len(pinned) == text.count("==")
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) == text.count("--hash") >= len(pinned)
