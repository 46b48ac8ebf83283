"""The Grafana board and the alert rules ask for metrics that there are, by labels that those have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.observe.metrics import ApiMetrics, EngineCounts, EngineMetrics, PartingMetrics, ServerMetrics, TierMetrics
from kvtier.transport.address import UnixAddress

_FOLDER = Path(__file__).parents[3] / "docs" / "grafana"
_NAME = re.compile(r"\bkvtier_[a-z0-9_]{1,80}\b")
_MATCHERS = re.compile(r"(kvtier_[a-z0-9_]{1,80})\{([^{}]{0,200})\}")
_MATCHER = re.compile(r'([a-z_]{1,40})(?:=~|!~|!=|=)"')
_GROUPS = re.compile(r"\bby \(([a-z_, ]{1,200})\)")
_SHOWN = re.compile(r"\{\{ ?(?:\$labels\.)?([a-z_]{1,40}) ?\}\}")
_OF_SCRAPES = {"instance", "job"}

Known = dict[str, set[str]]


def _labels_of(registry: CollectorRegistry, more: set[str]) -> Known:
    """By sample name, as Prometheus sees them, with the labels that each has."""
    known: Known = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            labels = set(getattr(collector, "_labelnames", ())) | set(getattr(family, "_labelnames", ())) | more
            endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            for ending in endings:
                known[family.name + ending] = labels | ({"le"} if ending == "_bucket" else set())
    return known


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder = tmp_path_factory.mktemp("server")
    config = CacheServerConfig(
        memory_bytes=1 << 20, unix=UnixAddress(str(folder / "s")), folder=folder / "disk", file_bytes=4 << 20
    )
    server = CacheServer(config)
    try:
        levels = server.catalog.inventory.levels()
        tenant = server.catalog.inventory.levels_of(server._tenants.owner)
    finally:
        server.close()
    metrics = ServerMetrics(lambda: levels, tenants=lambda: {"one": tenant})
    own = {"engine"}  # the HTTP server adds it to what an engine says
    return {
        **_labels_of(metrics.registry, set()),
        **_labels_of(TierMetrics().registry, own),
        **_labels_of(EngineMetrics(EngineCounts()).registry, own),
        **_labels_of(PartingMetrics().registry, own),
        **_labels_of(ApiMetrics().registry, set()),
    }


def _board_queries() -> Iterator[tuple[str, str]]:
    """Every query of the board, with what is shown of its labels."""
    board = json.loads((_FOLDER / "board.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def _rules() -> list[dict[str, str]]:
    document = yaml.safe_load((_FOLDER / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def _alert_queries() -> Iterator[tuple[str, str]]:
    for rule in _rules():
        yield rule["expr"], " ".join(rule["annotations"].values())


_QUERIES = [*_board_queries(), *_alert_queries()]


def test_there_is_something_to_look_at() -> None:
    assert len(list(_board_queries())) > 30
    assert len(_rules()) > 8


@pytest.mark.parametrize(("query", "shown"), _QUERIES, ids=[str(number) for number in range(len(_QUERIES))])
def test_every_metric_and_label_is_one_that_the_code_has(known: Known, query: str, shown: str) -> None:
    names = _NAME.findall(query)
    assert names
    assert [name for name in names if name not in known] == []
    for name, matchers in _MATCHERS.findall(query):
        assert set(_MATCHER.findall(matchers)) <= known[name] | _OF_SCRAPES, name
    groups = [set(re.split(r", ?", group)) for group in _GROUPS.findall(query)]
    for group in groups:
        assert any(group <= known[name] | _OF_SCRAPES for name in names), group
    kept = set.union(*groups) if groups else known[names[0]] | _OF_SCRAPES
    assert set(_SHOWN.findall(shown)) <= kept, "a label is shown that the query has summed away"


def test_the_boards_variables_are_known(known: Known) -> None:
    board = json.loads((_FOLDER / "board.json").read_text())
    (model,) = (one for one in board["templating"]["list"] if one["name"] == "model")
    name, label = re.fullmatch(r"label_values\((\w{1,80}), (\w{1,40})\)", model["query"]).groups()  # type: ignore[union-attr]
    assert label in known[name]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads((_FOLDER / "board.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_alerts_have_a_severity_and_sentences() -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "description"}
