"""`kvtier warm`, `kvtier prefix` and `kvtier pack` against a server in this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click import ClickException
from click.testing import CliRunner, Result

from kvtier.api.config import ApiKey
from kvtier.cli.main import main
from kvtier.packs.form import PackReader, PackWriter
from tests.support.fake_engine import Running, running
from tests.support.storing_engine import StoringEngine, storing_engine

DOCUMENT = " ".join(f"word{number}" for number in range(60))


@pytest.fixture
def below(tmp_path: Path) -> Iterator[StoringEngine]:
    with storing_engine(tmp_path, disk=None) as one:
        yield one


@pytest.fixture
def server(below: StoringEngine, tmp_path: Path) -> Iterator[Running]:
    keys = (ApiKey(name="ann", key="key-ann", share=True), ApiKey(name="root", key="key-root", admin=True, share=True))
    with running("openai", below.config(keys)) as one:
        (tmp_path / "tiny").mkdir()
        (tmp_path / "doc.md").write_text(DOCUMENT)
        (tmp_path / "system.txt").write_text("Be brief.")
        (tmp_path / "deploy.yml").write_text(
            f"models: [{{model: tiny}}]\n"
            f"http:\n  openai: {one.address[1]}\n  ollama: false\n"
            "  api_keys:\n"
            "    - {name: ann, key: key-ann, share: true}\n"
            "    - {name: root, key: key-root, share: true, admin: true}\n"
        )
        yield one


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [str(folder / one[1:]) if one.startswith("@") else one for one in arguments])


def warm(folder: Path, *options: str) -> Result:
    return run(folder, "warm", "@deploy.yml", "@doc.md", "--name", "rules", *options)


def test_a_prefix_from_its_documents_to_its_end(server: Running, tmp_path: Path) -> None:
    file = ("--deployment", "@deploy.yml")
    warmed = warm(tmp_path, "--system", str(tmp_path / "system.txt"), "--pin", "--ttl", "7d")
    assert warmed.exit_code == 0, warmed.output
    said = "rules: 64 tokens of tiny in 16 blocks, for chats of the API key root: 64KiB in memory"
    assert warmed.stdout.startswith(said), "progress is not for standard output"
    listed = run(tmp_path, "prefix", "ls", *file).output
    assert "rules  tiny   root  64" in listed
    assert "yes" in listed
    assert '"is_cut":false' in run(tmp_path, "prefix", "ls", "--json", *file).output
    assert "rules is no longer pinned" in run(tmp_path, "prefix", "unpin", "rules", *file).output
    assert "rules is pinned" in run(tmp_path, "prefix", "pin", "rules", *file).output
    assert "rules is called laws now" in run(tmp_path, "prefix", "rename", "rules", "laws", *file).output
    assert "laws is gone, with 16 blocks" in run(tmp_path, "prefix", "drop", "laws", *file).output
    gone = run(tmp_path, "prefix", "drop", "laws", *file)
    assert gone.exit_code == 1
    assert gone.output == "Error: there is no prefix called 'laws' here\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "<script>", "\x1b[31m", "x" * 129])
def test_a_name_that_no_prefix_can_have_is_refused_in_one_sentence(server: Running, tmp_path: Path, name: str) -> None:
    file = ("--deployment", "@deploy.yml")
    for arguments in (("prefix", "drop"), ("prefix", "pin"), ("pack", "export")):
        rest = ("@out.kvpack",) if arguments[0] == "pack" else ()
        said = run(tmp_path, *arguments, *file, "--", name, *rest)
        assert said.exit_code == 1
        assert said.output.startswith("Error: no prefix is called '")
        assert said.output.count("\n") == 1
        assert "\x1b" not in said.output


def test_the_sentence_of_a_server_that_is_not_the_right_one_is_shown(below: StoringEngine, tmp_path: Path) -> None:
    with running("ollama", below.config()) as ollama:
        said = run(tmp_path, "prefix", "ls", "--url", ollama.url)
    assert said.exit_code == 1
    assert "/kvtier/v1/prefixes does not exist" in said.output


def test_a_url_and_a_key_file_find_it_too(server: Running, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("key-root\n")
    (tmp_path / "other").write_text("key-ann\n")
    assert run(tmp_path, "prefix", "ls", "--url", server.url, "--api-key-file", "@admin").exit_code == 0
    refused = run(tmp_path, "prefix", "pin", "rules", "--url", server.url, "--api-key-file", "@other")
    assert "it needs admin: true" in refused.output
    assert "an API key is required" in run(tmp_path, "prefix", "ls", "--url", server.url).output
    for url in ("nonsense", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1", "ftp://127.0.0.1"):
        assert "is not a URL" in run(tmp_path, "prefix", "ls", "--url", url).output
    assert "does not answer" in run(tmp_path, "prefix", "ls", "--url", f"http://{'a' * 300}").output
    for key in ("key\nroot", "ключ"):
        (tmp_path / "odd").write_text(key)
        odd = run(tmp_path, "prefix", "ls", "--url", server.url, "--api-key-file", "@odd")
        assert odd.output.endswith("odd holds no API key: it must be one line of ASCII\n")
    assert "does not answer" in run(tmp_path, "prefix", "ls", "--url", "http://127.0.0.1:1").output


def test_documents_are_warmed_by_url_without_the_file_of_the_deployment(server: Running, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("key-root\n")
    at = ("--url", server.url, "--api-key-file", str(tmp_path / "admin"))
    warmed = run(tmp_path, "warm", "@doc.md", "--name", "rules", *at)
    assert warmed.exit_code == 0, warmed.output
    assert " tokens of tiny in " in warmed.output
    assert "rules" in run(tmp_path, "prefix", "ls", *at).output
    nothing = run(tmp_path, "warm", "--name", "rules")
    assert nothing.exit_code == 1
    assert "say which deployment: give its file first, or --url" in nothing.output
    keyed = run(tmp_path, "warm", "@deploy.yml", "@doc.md", "--name", "rules", *at[2:])
    assert "--api-key-file is for --url" in keyed.output


def test_what_cannot_be_warmed_is_said_in_one_sentence(server: Running, tmp_path: Path) -> None:
    (tmp_path / "doc.md").write_bytes(b"\xff\xfe")
    assert "is not text in UTF-8" in warm(tmp_path).output
    (tmp_path / "doc.md").write_text("short")
    assert "nothing can be cached" in warm(tmp_path).output
    assert "is not a time" in warm(tmp_path, "--ttl", "soon").output
    assert "key must be the name of an API key" in warm(tmp_path, "--key", "nobody").output
    text = (tmp_path / "deploy.yml").read_text().replace(", admin: true", "")
    (tmp_path / "deploy.yml").write_text(text)
    assert "give one admin: true" in warm(tmp_path).output


@pytest.mark.parametrize("options", [(), ("--sign-key", "@key")])
def test_a_pack_is_written_and_read_again(
    server: Running, below: StoringEngine, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = ("--deployment", "@deploy.yml")
    (tmp_path / "key").write_text("a key of sixteen bytes or more")
    assert warm(tmp_path).exit_code == 0
    exported = run(tmp_path, "pack", "export", "rules", "@rules.kvpack", "--with-text", *options, *file)
    assert exported.exit_code == 0, exported.output
    assert [path.name for path in tmp_path.glob("*.kvpack*")] == ["rules.kvpack"]
    inspected = run(tmp_path, "pack", "inspect", "@rules.kvpack", "--verify", *options)
    assert "whole      yes" in inspected.output
    assert f"signed     {'yes' if options else 'no'}" in inspected.output
    assert run(tmp_path, "prefix", "drop", "rules", *file).exit_code == 0
    imported = run(tmp_path, "pack", "import", "@rules.kvpack", "--name", "laws", "--pin", *options, *file)
    assert "laws: 15 blocks, 15 of them new to the cache" in imported.output
    assert "laws   tiny" in run(tmp_path, "prefix", "ls", *file).output
    assert below.client.stats()["pinned_bytes"] == 15 * 4096
    again = run(tmp_path, "pack", "import", "@rules.kvpack", "--server", below.address, *options)
    assert "without a name: 15 blocks, 0 of them new to the cache" in again.output


def test_a_pin_of_what_is_cached_in_part_is_said_to_be_partial(
    server: Running, below: StoringEngine, tmp_path: Path
) -> None:
    assert warm(tmp_path).exit_code == 0
    below.client.drop([block_hash for block_hash, _ in below.client.list_blocks()][:5])
    said = run(tmp_path, "prefix", "pin", "rules", "--deployment", "@deploy.yml")
    assert said.output == "rules is pinned in part: 10 of 15 blocks, for the others are not cached; warm it again\n"


def test_of_two_models_with_the_same_weights_the_one_with_the_packs_name_gets_the_prefix(
    below: StoringEngine, tmp_path: Path
) -> None:
    config = below.config()
    [tiny] = config.models
    twin = msgspec.structs.replace(tiny, names=("twin",))
    (tmp_path / "doc.md").write_text(DOCUMENT)
    with running("openai", msgspec.structs.replace(config, models=(twin, tiny))) as server:
        at = ("--url", server.url)
        assert run(tmp_path, "warm", "@doc.md", "--name", "rules", "--model", "tiny", *at).exit_code == 0
        assert run(tmp_path, "pack", "export", "rules", "@rules.kvpack", *at).exit_code == 0
        assert run(tmp_path, "pack", "import", "@rules.kvpack", "--name", "laws", *at).exit_code == 0
        listed = msgspec.json.decode(run(tmp_path, "prefix", "ls", "--json", *at).output)["prefixes"]
    assert {one["name"]: one["model"] for one in listed} == {"rules": "tiny", "laws": "tiny", None: "twin, tiny"}


def test_no_pack_is_written_to_a_terminal(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm(tmp_path).exit_code == 0
    master, slave = os.openpty()
    try:
        with open(slave, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            with pytest.raises(ClickException, match="a pack is not for a terminal"):
                main(
                    ["pack", "export", "rules", "-", "--deployment", str(tmp_path / "deploy.yml")],
                    standalone_mode=False,
                )
            monkeypatch.undo()
    finally:
        os.close(master)


def test_a_pack_is_written_into_a_pipe_and_no_file_takes_its_place(server: Running, tmp_path: Path) -> None:
    assert warm(tmp_path).exit_code == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), name="reader")
    reader.start()
    exported = run(tmp_path, "pack", "export", "rules", "@pipe", "--deployment", "@deploy.yml")
    reader.join()
    assert exported.exit_code == 0, exported.output
    assert pipe.is_fifo()
    (tmp_path / "rules.kvpack").write_bytes(read[0])
    assert "whole      yes" in run(tmp_path, "pack", "inspect", "@rules.kvpack", "--verify").output
    missing = run(tmp_path, "pack", "export", "rules", "@none/rules.kvpack", "--deployment", "@deploy.yml")
    assert missing.output.endswith("none/rules.kvpack cannot be written: No such file or directory\n")
    full = run(tmp_path, "pack", "export", "rules", "/dev/full", "--deployment", "@deploy.yml")
    assert full.exit_code == 1
    assert full.output.endswith("/dev/full cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "text", [b"no JSON", b"[" * 100_000, b"\xff", b'{"documents": ["a"], "more": 1}', b'{"documents": []}']
)
def test_a_pack_with_an_odd_text_is_refused_in_one_sentence(
    server: Running, below: StoringEngine, tmp_path: Path, text: bytes
) -> None:
    file = ("--deployment", "@deploy.yml")
    assert warm(tmp_path).exit_code == 0
    assert run(tmp_path, "pack", "export", "rules", "@rules.kvpack", *file).exit_code == 0
    with (tmp_path / "rules.kvpack").open("rb", buffering=0) as source, (tmp_path / "odd.kvpack").open("wb") as odd:
        reader = PackReader(source, "rules")
        writer = PackWriter(odd, msgspec.structs.replace(reader.header, text_bytes=len(text)), reader.hashes, text)
        for section in reader.sections():
            writer.write(section.data)
        writer.finish()
    below.client.drop()
    refused = run(tmp_path, "pack", "import", "@odd.kvpack", "--name", "odd", *file)
    assert refused.exit_code == 1
    assert refused.exception is None or isinstance(refused.exception, SystemExit)
    assert "odd.kvpack is damaged: its text cannot be read" in refused.output
    assert below.client.stats()["blocks"] == 0


def test_a_pack_that_does_not_fit_or_is_damaged_is_refused(
    server: Running, below: StoringEngine, tmp_path: Path
) -> None:
    file = ("--deployment", "@deploy.yml")
    assert warm(tmp_path).exit_code == 0
    assert run(tmp_path, "pack", "export", "rules", "@rules.kvpack", *file).exit_code == 0
    data = (tmp_path / "rules.kvpack").read_bytes()
    (tmp_path / "rules.kvpack").write_bytes(data[:-100])
    refused = run(tmp_path, "pack", "import", "@rules.kvpack", *file)
    assert refused.exit_code == 1
    assert refused.output.endswith("rules.kvpack is cut off\n")
    piped = CliRunner().invoke(main, ["pack", "inspect", "-", "--verify"], input=data[:-100])
    assert "Error: standard input is cut off" in piped.output
    (tmp_path / "rules.kvpack").write_bytes(b"#!/bin/sh\n" * 100)
    assert "is not a pack" in run(tmp_path, "pack", "inspect", "@rules.kvpack").output
    assert "No such file" in run(tmp_path, "pack", "inspect", "@nothing.kvpack").output
    missing = run(tmp_path, "pack", "export", "nothing", "@x.kvpack", *file)
    assert "there is no prefix called 'nothing' here" in missing.output
    assert not (tmp_path / "x.kvpack").exists()
    below.client.drop()
    assert run(tmp_path, "pack", "export", "rules", "@x.kvpack", *file).exit_code == 1
    assert not list(tmp_path.glob("x.kvpack*"))
