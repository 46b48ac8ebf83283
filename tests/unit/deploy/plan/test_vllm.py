"""Models that vLLM runs, in a deployment file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.deploy.plan.parts import DeploymentPlan, VllmPart, decode_part, encode_part

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]


def test_an_engine_of_vllm_has_its_whole_command_line(deploy: Deploy) -> None:
    plan = deploy(
        """
        models:
          - model: owner/model
            name: qwen
            engine: vllm
            engines: 2
            max_model_len: 4096
            trust_remote_code: true
            always_load: true
            vllm: [--tensor-parallel-size, 2, "--override-generation-config={\\"temperature\\": 0}"]
        cache: {memory: 1GiB}
        """
    )

    assert plan.engines == ()
    first, second = plan.vllm_engines
    assert (first.name, second.name, first.served_as) == ("qwen-0", "qwen-1", "qwen")
    assert (first.python, first.device, first.model) == (sys.executable, "auto", "owner/model")
    arguments = list(first.arguments)
    config = json.loads(arguments.pop(arguments.index("--kv-transfer-config") + 1))
    assert arguments == [
        *("--model", "owner/model", "--served-model-name", "qwen", "owner/model", "qwen:latest"),
        *("--uds", "/run/kvtier/qwen-0.sock"),
        *("--disable-uvicorn-access-log", "--kv-transfer-config"),
        *("--max-model-len", "4096", "--trust-remote-code", "--tensor-parallel-size", "2"),
        '--override-generation-config={"temperature": 0}',
    ]
    assert config == {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.plugins.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "server": "unix:/run/kvtier/cache.sock",
            "always_load": True,
            "prompt_events": "unix:/run/kvtier/qwen-0.prompts.sock",
        },
    }
    (served,) = plan.http.api.models
    assert served.is_vllm
    assert [engine.socket for engine in served.engines] == ["/run/kvtier/qwen-0.sock", "/run/kvtier/qwen-1.sock"]
    assert decode_part(encode_part(first), VllmPart) == first


def test_several_engines_with_a_cache_report_their_prompts(deploy: Deploy) -> None:
    def sockets(fields: str, cache: str = "cache: {memory: 1GiB}") -> list[str]:
        plan = deploy(f"models: [{{model: owner/model, name: qwen, engine: vllm, {fields}}}]\n{cache}")
        found = [part.prompts_socket for part in plan.vllm_engines]
        assert found == [engine.prompts for engine in plan.http.api.models[0].engines]
        told = ["prompt_events" in " ".join(part.arguments) for part in plan.vllm_engines]
        assert told == [bool(one) for one in found]
        return found

    assert sockets("engines: 2") == [f"/run/kvtier/qwen-{number}.prompts.sock" for number in range(2)]
    assert sockets("engines: 1") == [""]
    assert sockets("engines: 2, prompt_events: false") == ["", ""]
    assert sockets("engines: 2", cache="") == ["", ""]


def test_without_a_cache_there_is_no_connector(deploy: Deploy) -> None:
    (part,) = deploy("models: [{model: owner/model, engine: vllm}]").vllm_engines

    assert "--kv-transfer-config" not in part.arguments
    assert part.cache_server == ""


def test_engines_of_both_kinds_are_in_one_deployment(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/one}, {model: owner/two, engine: vllm, devices: ['cuda:0,1', cuda:2]}]")

    assert [part.name for part in plan.engines] == ["owner-one"]
    assert [part.device for part in plan.vllm_engines] == ["cuda:0,1", "cuda:2"]
    assert [model.is_vllm for model in plan.http.api.models] == [False, True]


def test_the_other_form_has_it_too(deploy: Deploy, here: Path) -> None:
    (here / "python").touch()
    plan = deploy(
        """
        chat:
          models:
            - model: owner/model
              engine_args: {engine: vllm, vllm: [--enforce-eager], vllm_python: python}
        """
    )

    (part,) = plan.vllm_engines
    assert part.arguments[-1] == "--enforce-eager"
    assert part.python == str(here / "python")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ("vllm: [--port, 80]", "vllm must not have --port: kvtier chooses where an engine listens"),
        ("vllm: [--po=80]", "vllm must not have --po=80: kvtier chooses where an engine listens"),
        ("vllm: [--served_model_name, x]", "vllm must not have --served_model_name: the model's field name says it"),
        ("vllm: [--api-key, x]", "vllm must not have --api-key: http.api_keys says who may ask"),
        (
            "vllm: [--kv-transfer-config.kv_role=kv_both]",
            "vllm must not have --kv-transfer-config.kv_role=kv_both: kvtier's connector is set up by the model's "
            "field cache",
        ),
        (
            "vllm: [--max-num-seqs 4]",
            "vllm has '--max-num-seqs 4', which is two arguments: write --max-num-seqs=4, or one after the other",
        ),
        ("vllm: --enforce-eager", "models[0].vllm must be a list, each text or a whole number or a number, "),
        ("vllm: [true]", "models[0].vllm[0] must be text or a whole number or a number, not true"),
        (
            "max_model_len: 5, vllm: [--max_model_len=6]",
            "max_model_len and --max-model-len in vllm say the same: give one of them",
        ),
        ("swap_space: 1", "swap_space is for kvtier's own engine, not for vLLM: give the cache more memory"),
        ("schedule: sync", "schedule is for kvtier's own engine, not for vLLM"),
        ("default_options: {max_tokens: 5}", "default_options is for kvtier's own engine, not for vLLM: give vllm "),
        ("vllm_python: nowhere/python", "nowhere/python does not exist"),
        ("name: -x", "name must not begin with a dash for vLLM, as '-x' does"),
        ("cache_server: [unix:/a, unix:/b]", "cache_server takes one address"),
        ("device: tpu", "device must be auto, cpu, cuda, cuda:N,M or cuda:N, not 'tpu'"),
    ],
)
def test_mistakes_are_one_sentence(refuse: Refuse, fields: str, sentence: str) -> None:
    (found,) = refuse(f"models: [{{model: owner/model, engine: vllm, {fields}}}]")

    assert found.startswith("deploy.yml:1: ")
    assert sentence in found


@pytest.mark.parametrize("fields", ["vllm: [--x]", "vllm_python: /bin/python", "prompt_events: false"])
def test_arguments_are_for_vllm(refuse: Refuse, fields: str) -> None:
    (found,) = refuse(f"models: [{{model: owner/model, {fields}}}]")

    assert found.endswith("is for a model with engine: vllm")


def test_arguments_are_bounded(refuse: Refuse) -> None:
    many = ", ".join(["x"] * 257)

    assert (
        "vllm must not be more than 256 arguments, but is 257"
        in refuse(f"models: [{{model: a/b, engine: vllm, vllm: [{many}]}}]")[0]
    )
    assert "at most 16384 characters" in refuse(f"models: [{{model: a/b, engine: vllm, vllm: [{'x' * 16385}]}}]")[0]
