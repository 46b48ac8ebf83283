"""`default_options.logit_bias` in a deployment file: its keys are text there, and token ids where requests are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.api.config import EngineAddress, ServedModelConfig
from kvtier.deploy.plan.parts import DeploymentPlan, HttpPart, decode_part, encode_part
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import ConfigError

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]


def test_a_bias_arrives_in_the_http_process(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model, default_options: {logit_bias: {'5': -100, '7': 1.5}}}]")

    part = decode_part(encode_part(plan.http), HttpPart)

    (model,) = part.api.models
    assert model.default_options == {"logit_bias": {5: -100, 7: 1.5}}
    assert SamplingParams(**model.default_options).logit_bias == {5: -100, 7: 1.5}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ("{x: 1}", "logit_bias"),
        ("{'5': 101}", "logit_bias must be from -100 to 100"),
        ("{'5': much}", "logit_bias.5 must be a number"),
        ("{'99999999999999999999': 1}", "logit_bias"),
        ("[5]", "logit_bias must be a mapping"),
    ],
)
def test_a_bias_that_is_none_is_refused_with_its_line(refuse: Refuse, bias: str, sentence: str) -> None:
    (found,) = refuse(f"models:\n  - model: owner/model\n    default_options:\n      logit_bias: {bias}\n")

    assert found.startswith("deploy.yml:4: ")
    assert sentence in found


def test_ids_may_be_numbers_where_python_makes_the_settings() -> None:
    model = ServedModelConfig(
        names=("m",), engines=(EngineAddress("e", "/s"),), default_options={"logit_bias": {5: 1.0}}
    )
    assert model.default_options == {"logit_bias": {5: 1.0}}
    with pytest.raises(ConfigError, match="default_options of m"):
        ServedModelConfig(names=("m",), engines=(), default_options={"logit_bias": {"five": 1.0}})
