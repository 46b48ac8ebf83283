"""`warm` in a deployment file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.api.config import CacheAddress, WarmUp
from kvtier.deploy.plan.parts import DeploymentPlan, HttpPart, decode_part, encode_part

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]
START = "models: [{model: owner/model}]\ncache: {memory: 1GiB, disk: 1GiB, folder: kv}\n"


def test_documents_are_found_beside_the_file_in_the_order_of_their_names(deploy: Deploy, here: Path) -> None:
    (here / "docs").mkdir()
    for name in ("b.md", "a.md", "c.txt"):
        (here / "docs" / name).touch()
    (here / "system").touch()
    plan = deploy(
        START + "warm: [{name: handbook, documents: [docs/c.txt, 'docs/*.md'], system: system, pin: true, ttl: 7d}]"
    )

    api = plan.http.api
    assert api.warm == (
        WarmUp(
            name="handbook",
            model="owner/model",
            documents=tuple(here / "docs" / name for name in ("c.txt", "a.md", "b.md")),
            system=here / "system",
            pin=True,
            ttl_s=604_800.0,
        ),
    )
    assert api.models[0].cache == CacheAddress(address="unix:/run/kvtier/cache.sock")
    assert api.prefix_folder == here / "kv" / "prefixes"
    assert decode_part(encode_part(plan.http), HttpPart) == plan.http


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (START + "warm: [{name: a/b, system: s}]", "name must have at most 128 letters"),
        (START + "warm: [{name: a}]", "documents must be given, or system"),
        (START + "warm: [{name: a, documents: [nothing.md]}]", "there is no file nothing.md"),
        (START + "warm: [{name: a, documents: ['no*.md']}]", "there is no file no*.md"),
        (START + "warm: [{name: a, documents: [doc]}, {name: a, documents: [doc]}]", "two prefixes are called 'a'"),
        (START + "warm: [{name: a, documents: [doc], model: b}]", "there is no model 'b'"),
        (START + "warm: [{name: a, documents: [doc], ttl: soon}]", "is not a time"),
        (START + "warm: [{name: a, documents: [doc], key: k}]", "there is no API key 'k'; the file has none"),
        (START + "http: {api_keys: [{name: k, key: secret}]}\nwarm: [{name: a, documents: [doc]}]", "there is k"),
        ("models: [{model: owner/model}]\nwarm: [{name: a, documents: [doc]}]", "it has no cache server"),
    ],
)
def test_what_cannot_be_warmed_is_refused(refuse: Refuse, here: Path, text: str, sentence: str) -> None:
    (here / "doc").touch()
    (here / "s").touch()
    [found] = refuse(text)
    assert sentence in found
    assert found.count(".yml:") <= 1  # the line is named once
