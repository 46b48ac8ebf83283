"""Documents with names, end to end: warmed, found after a restart of everything, carried to another deployment."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import DeploymentProcess
from tests.support.serving import MODEL, TEXT, client_of, save_model
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

_DOCUMENT = "".join(f"{number}. The rule with the number {number * 7919} is kept. " for number in range(40))
_SYSTEM = "Answer in one sentence."
_QUESTION = "Which rule comes first?"


def run(deployment: DeploymentProcess, *arguments: str, status: int = 0) -> str:
    """A `kvtier` command, as the user of that deployment starts it: what it says. Others may run on this machine."""
    if arguments[0] in ("prefix", "pack") and arguments[1] != "inspect":
        arguments = (*arguments, "--deployment", "deploy.yml")
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments],
        env=deployment.user_environment,
        cwd=deployment.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def ask(deployment: DeploymentProcess, messages: list[dict[str, str]], **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    with client_of(deployment) as client:
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
    return document


def ask_about_it(deployment: DeploymentProcess) -> dict[str, Any]:
    """With the document itself."""
    return ask(
        deployment,
        [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}],
    )


def cached(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return {tier: count for tier, count in found.items() if count}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def write_files(folder: Path) -> None:
    (folder / "docs").mkdir(parents=True, exist_ok=True)
    (folder / "docs" / "rules.md").write_text(_DOCUMENT)
    (folder / "system.txt").write_text(_SYSTEM)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[DeploymentProcess]:
    folder = tmp_path / "one"
    folder.mkdir()
    save_model(folder / MODEL)
    write_files(folder)
    with DeploymentProcess(folder, TEXT) as one:
        yield one


def warm(deployment: DeploymentProcess, *options: str) -> str:
    return run(deployment, "warm", "deploy.yml", "docs/rules.md", "--name", "rules", "--system", "system.txt", *options)


def test_what_was_warmed_is_served_from_disk_after_everything_was_started_again(
    deployment: DeploymentProcess,
) -> None:
    said = warm(deployment, "--pin", "--ttl", "7d")
    assert "rules:" in said
    assert "on disk" in said
    deployment.stop()
    deployment.start()
    deployment.wait_until_ready()
    answer = ask_about_it(deployment)
    num_blocks = int(said.rpartition(" in ")[0].rpartition("blocks")[0].split()[-1])
    assert cached(answer) == {"disk": 16 * num_blocks}
    named = ask(deployment, [{"role": "user", "content": _QUESTION}], prefix="rules")
    assert text_of(named) == text_of(answer)
    assert named["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert sum(cached(named).values()) >= 16 * num_blocks
    listed = run(deployment, "prefix", "ls")
    assert "rules" in listed
    assert "yes" in listed
    assert "is called handbook now" in run(deployment, "prefix", "rename", "rules", "handbook")
    assert "is no longer pinned" in run(deployment, "prefix", "unpin", "handbook")
    assert "is pinned" in run(deployment, "prefix", "pin", "handbook")
    assert f"with {num_blocks} blocks" in run(deployment, "prefix", "drop", "handbook")
    assert "there is no prefix called 'handbook' here" in run(deployment, "prefix", "drop", "handbook", status=1)
    # The device still has what the cache was told to drop: it is stored once more.
    assert f"in {num_blocks} blocks" in warm(deployment)


def test_a_start_ends_with_the_documents_of_the_file_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    save_model(folder / MODEL)
    write_files(folder)
    section = "warm:\n  - {name: rules, documents: [docs/*.md], system: system.txt, pin: true}\n"
    with DeploymentProcess(folder, TEXT + section) as deployment:
        deployment.wait_for_log("warm rules:")
        answer = ask_about_it(deployment)
        assert sum(cached(answer).values()) > 0.9 * answer["usage"]["prompt_tokens"]
        deployment.wait_for_part("http").send_signal(signal.SIGKILL)
        deployment.wait_for_log(r"already cached")


def test_a_pack_brings_a_prefix_to_another_deployment(deployment: DeploymentProcess, tmp_path: Path) -> None:
    warm(deployment)
    expected = ask_about_it(deployment)
    (deployment.folder / "key").write_text("a key that both of them have")
    pack = str(tmp_path / "rules.kvpack")
    run(deployment, "pack", "export", "rules", pack, "--with-text", "--sign-key", "key")
    inspected = run(deployment, "pack", "inspect", pack, "--verify", "--sign-key", "key")
    assert "signed     yes" in inspected
    assert "whole      yes" in inspected
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / MODEL).symlink_to(deployment.folder / MODEL)
    (folder / "key").write_text("a key that both of them have")
    with DeploymentProcess(folder, TEXT) as other:
        assert "is signed: give the key" in run(other, "pack", "import", pack, status=1)
        refused = run(other, "pack", "import", pack, "--sign-key", "key", "--name", "../rules", status=1)
        assert "cannot be called '../rules'" in refused
        assert "of them new to the cache" in run(
            other, "pack", "import", pack, "--sign-key", "key", "--name", "imported"
        )
        other.stop()
        other.start()
        other.wait_until_ready()
        answer = ask(other, [{"role": "user", "content": _QUESTION}], prefix="imported")
        assert text_of(answer) == text_of(expected)
        assert cached(answer) == {"disk": sum(cached(answer).values())}
        assert sum(cached(answer).values()) > 0.9 * answer["usage"]["prompt_tokens"]


def test_a_pack_is_refused_by_other_weights_with_the_field_that_differs(
    deployment: DeploymentProcess, tmp_path: Path
) -> None:
    warm(deployment)
    pack = str(tmp_path / "rules.kvpack")
    run(deployment, "pack", "export", "rules", pack)
    folder = tmp_path / "two"
    folder.mkdir()
    save_model(folder / MODEL, seed=1)
    with DeploymentProcess(folder, TEXT) as other:
        assert "weights differ" in run(other, "pack", "import", pack, status=1)
