"""Ports of KV events where a model has several engines of vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvtier.deploy.plan.parts import DeploymentPlan
from kvtier.deploy.plan.vllm_events import with_own_ports

Deploy = Callable[[str], DeploymentPlan]


def test_each_engine_publishes_on_a_port_of_its_own(deploy: Deploy) -> None:
    plan = deploy(
        """
        models:
          - model: owner/model
            engine: vllm
            engines: 3
            vllm: [--kv-events-config, '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6000"}', --seed, 1]
        """
    )

    configs = [one.arguments[one.arguments.index("--kv-events-config") + 1] for one in plan.vllm_engines]
    assert [json.loads(config) for config in configs] == [
        {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:6000"},
        {"enable_kv_cache_events": True, "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:6001"},
        {"enable_kv_cache_events": True, "endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:6002"},
    ]
    assert all(one.arguments[-2:] == ("--seed", "1") for one in plan.vllm_engines)


@pytest.mark.parametrize(
    ("endpoint", "moved"),
    [
        ("tcp://*:7000", "tcp://*:7002"),
        ("tcp://[::]:7000", "tcp://[::]:7002"),
        ("tcp://router:7000", "tcp://router:7000"),
        ("ipc:///run/events", "ipc:///run/events"),
        (7, 7),
    ],
)
def test_only_ports_that_vllm_listens_on_are_moved(endpoint: object, moved: object) -> None:
    (argument,) = with_own_ports([f"--kv_events_config={json.dumps({'endpoint': endpoint})}"], 2)

    assert json.loads(argument.partition("=")[2]) == {"endpoint": moved}


@pytest.mark.parametrize("arguments", [["--kv-events-config"], ["--kv-events-config", "{"], ["--kv-events-config=[]"]])
def test_a_config_that_is_wrong_is_left_for_vllm_to_refuse(arguments: list[str]) -> None:
    assert with_own_ports(arguments, 1) == arguments
