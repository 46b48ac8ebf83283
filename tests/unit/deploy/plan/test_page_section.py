"""`page` in a deployment file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.api.config import ApiConfig, PageConfig, ShownCache
from kvtier.deploy.plan.parts import DeploymentPlan, HttpPart, decode_part, encode_part

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]


def test_there_is_a_page_that_knows_the_caches_unless_told(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model}]\ncache: {memory: 1GiB}\n")

    assert plan.http.api.page == PageConfig(caches=(ShownCache("cache", "unix:/run/kvtier/cache.sock"),))
    assert decode_part(encode_part(plan.http), HttpPart) == plan.http


def test_it_is_switched_off_and_priced_in_the_file(deploy: Deploy) -> None:
    off: ApiConfig = deploy("models: [{model: owner/model}]\npage: {enabled: false}\n").http.api
    priced = deploy("models: [{model: owner/model}]\npage: {gpu_hour_price: 2.5, currency: EUR}\n").http.api

    assert off.page is None
    assert priced.page == PageConfig(gpu_hour_price=2.5, currency="EUR")


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("{gpu_hour_price: 0}", "gpu_hour_price must be above 0"),
        ("{gpu_hour_price: .nan}", "gpu_hour_price must be a number"),
        ("{gpu_hour_price: 1.0e+6}", "gpu_hour_price must be above 0"),
        ("{currency: ''}", "currency must be 1 to 8"),
        ("{currency: 'aaaaaaaaa'}", "currency must be 1 to 8"),
        ("{on: true}", "on"),
        ("true", "page"),
    ],
)
def test_wrong_settings_are_told_with_their_line(refuse: Refuse, section: str, named: str) -> None:
    [sentence] = refuse(f"models: [{{model: owner/model}}]\npage: {section}\n")

    assert sentence.startswith("deploy.yml:2")
    assert named in sentence


def test_an_admin_key_arrives(deploy: Deploy) -> None:
    plan = deploy(
        "models: [{model: owner/model}]\nhttp: {api_keys: [{name: a, key: secret-key, admin: true}]}\n",
    )
    assert plan.http.api.keys[0].admin
