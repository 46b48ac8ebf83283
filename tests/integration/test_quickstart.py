"""docs/quickstart.md: its commands, one after the other in one shell, lead to a hit after a restart.

They run unchanged, except for the installation and the ports.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.clone import lay_out, run_commands
from tests.support.document_code import code_in

pytestmark = pytest.mark.slow  # two deployments

INSTALLATION, *COMMANDS = code_in("docs/quickstart.md", "bash")
_ANSWER = re.compile(r"^(.*)\n  first token after .* (\d+) prompt tokens: (.*)\n  request id: \S+$", re.MULTILINE)


def test_the_commands_lead_to_a_hit_after_a_restart(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("the document's commands need bash")
    assert INSTALLATION.text == "make install\n", "the tests run in what it installs"
    lay_out(tmp_path)

    said = run_commands("\n".join(code.text for code in COMMANDS), tmp_path)

    first, second, third, small_talk = _ANSWER.findall(said)
    assert "it would start" in said
    assert [answer[0] for answer in (first, second, third)] == [
        "The home of the owl is Wexford.",
        "The home of the heron is Kingsbridge.",
        "The keeper of the forge is Alma.",
    ]
    assert "computed" in first[2]
    assert "from device" in second[2]
    assert "from disk" in third[2]
    tokens, cached = int(third[1]), int(third[2].split()[0])
    assert cached > 0.9 * tokens, "all but the question"
    assert small_talk[0].startswith("A cache that computes every prompt prefix once")
    assert not (tmp_path / "quickstart-cache").exists()
