"""One source for several releases of vLLM: what differs between them, and what is said of all others."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import logging
from types import SimpleNamespace

import pytest
import vllm
from vllm.distributed.kv_events import BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvtier.plugins.vllm as plugin
from kvtier.plugins.vllm import compat, inert
from kvtier.plugins.vllm.releases import NEWEST, OLDEST, ReleaseFit, fit_of, release_of
from kvtier.plugins.vllm_entry import register
from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import answers_without_cache, ask_one, engine, model_folder, tokens_of

_RELEASE = release_of(vllm.__version__)
_PROMPT = tokens_of(100)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log lines about the release; through another logger, since the first engine sets up vLLM's anew."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(inert, "logger", logging.getLogger("connector under test"))
    return caplog


def _said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "connector under test"]


def test_this_release_is_one_that_the_connector_is_for() -> None:
    assert fit_of(vllm.__version__) is ReleaseFit.TESTED


def test_hits_have_sources_since_0_32() -> None:
    has_sources = importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None

    assert has_sources == (_RELEASE >= (0, 32))
    assert {"HOST", "DISK"} <= set(compat.CacheHitSource.__members__)


def test_saves_are_asked_for_in_steps_that_compute_nothing_since_0_31() -> None:
    source = inspect.getsource(KVConnectorModelRunnerMixin.kv_connector_no_forward)

    assert ("wait_for_save=False" not in source) == (_RELEASE >= (0, 31)) == compat.SAVES_IN_IDLE_STEPS


def test_what_is_over_is_told_as_results_since_0_30() -> None:
    assert hasattr(base, "KVConnectorTransferResults") == (_RELEASE >= (0, 30))
    assert compat.KVConnectorTransferResults({"a"}, {"b"}, set()).finished_recving == {"b"}


def test_connectors_get_the_cache_manager_since_0_30() -> None:
    assert hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager") == (_RELEASE >= (0, 30))
    assert _RELEASE >= (0, 30) or not compat.HANDS_OVER_STATES  # without it, several groups are not cached


def test_a_tiers_jobs_have_chunks_since_0_30() -> None:
    job_type = getattr(tiering, "TransferJob", None) or tiering.JobMetadata
    names = {one.name for one in dataclasses.fields(job_type)}

    assert ("chunk_ids" in names) == (_RELEASE >= (0, 30))
    assert ("block_ids" in names) == (_RELEASE < (0, 30))
    assert compat.rows_of(SimpleNamespace(chunk_ids=[3, 4])) == [3, 4]
    assert compat.rows_of(SimpleNamespace(block_ids=[3, 4])) == [3, 4]


def test_tiers_are_made_with_a_detector_of_backpressure_since_0_31() -> None:
    named = {"offloading_spec": None, "backpressure_detector": None, "unheard_of": None}
    known = compat.known_arguments(tiering.SecondaryTierManager.__init__, named)

    assert set(known) == {"offloading_spec", *(["backpressure_detector"] if _RELEASE >= (0, 31) else [])}


def test_results_and_events_have_the_fields_that_this_release_knows() -> None:
    result = compat.made_with_known(tiering.JobResult, {"job_id": 1, "success": True, "unheard_of": 2})
    removed = compat.made_with_known(BlockRemoved, {"block_hashes": [b"a"], "medium": "CPU", "unheard_of": 2})

    assert (result.job_id, result.success) == (1, True)
    assert (removed.block_hashes, removed.medium) == ([b"a"], "CPU")


def test_an_engines_config_is_its_specs_or_that_of_the_callers_who_have_this_very_spec() -> None:
    def made_for(spec: object, vllm_config: str, kv_cache_config: str) -> object:
        return asked(tier_spec) if spec is not None else None

    def asked(offloading_spec: object) -> object:
        return compat.configs_of(offloading_spec)

    tier_spec = object()

    assert compat.configs_of(SimpleNamespace(vllm_config="a", kv_cache_config="b")) == ("a", "b")
    assert made_for(tier_spec, "a", "b") == ("a", "b")
    assert made_for(object(), "a", "b") is None
    assert asked(tier_spec) is None


@pytest.mark.parametrize(("seed", "is_set"), [("0", True), (None, hasattr(kv_cache_utils, "resolve_none_hash_seed"))])
def test_hashes_are_the_same_in_every_process_or_need_a_seed(
    seed: str | None, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)

    assert compat.has_stable_hashes() is is_set


def test_pages_of_every_scheduled_request_are_reported_since_0_30() -> None:
    assert (_RELEASE >= (0, 30)) == compat.HANDS_OVER_STATES


@pytest.mark.parametrize(
    ("version", "fit"),
    [
        ("0.28.1", ReleaseFit.OLDER),
        ("0.9.0.1", ReleaseFit.OLDER),
        (f"{OLDEST[0]}.{OLDEST[1]}.0", ReleaseFit.TESTED),
        ("0.30.2+cpu", ReleaseFit.TESTED),
        ("0.31.0rc1.dev5+g123", ReleaseFit.TESTED),
        (f"{NEWEST[0]}.{NEWEST[1]}.7", ReleaseFit.TESTED),
        ("0.33.0", ReleaseFit.NEWER),
        ("1.0.0", ReleaseFit.NEWER),
        ("0.1.dev1+gabc", ReleaseFit.NEWER),
        ("dev", ReleaseFit.NEWER),
    ],
)
def test_versions_are_told_apart(version: str, fit: ReleaseFit) -> None:
    assert fit_of(version) is fit


@pytest.mark.parametrize("version", ["0.28.0", "0.26.0"])
def test_an_older_release_gets_one_sentence_and_answers_without_the_cache(
    server: ServerProcess, version: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    (expected,) = answers_without_cache(model_folder(), [_PROMPT])
    monkeypatch.setattr(plugin, "KvtierConnector", plugin.connector_for(version))
    with engine(model_folder(), server.unix) as llm:
        answers = [ask_one(llm, _PROMPT) for _ in range(2)]

    assert [answer.tokens for answer in answers] == [expected] * 2
    assert _said(log) == [f"kvtier works with vLLM 0.29 to 0.32, not {version}: nothing is cached"]


def test_a_newer_release_is_tried_with_a_warning(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "KvtierConnector", plugin.connector_for("0.33.0"))
    with engine(model_folder(), server.unix) as llm:
        for _ in range(2):
            answer = ask_one(llm, _PROMPT)

    assert answer.num_cached >= 96
    assert issubclass(plugin.connector_for("0.33.0"), plugin.connector_for(vllm.__version__))
    assert _said(log) == ["kvtier is tested with vLLM 0.29 to 0.32; trying vLLM 0.33.0"]


def test_a_newer_release_whose_interface_does_not_fit_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = plugin.connector_for(vllm.__version__)
    monkeypatch.setattr(tested, "__abstractmethods__", frozenset({"teleport"}))

    made = plugin.connector_for("0.40.0")

    assert not issubclass(made, tested)
    assert not made.__abstractmethods__


def test_the_inert_connector_implements_whatever_a_release_asks_for() -> None:
    assert not inert.inert_connector("nothing is cached").__abstractmethods__


def test_the_entry_point_makes_the_connectors_name_enough(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = [
        one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "kvtier"
    ] or [None]
    if point is not None:  # where this checkout is what is installed
        assert point.value == "kvtier.plugins.vllm_entry:register"
    for _ in range(2):
        register()
    assert KVConnectorFactory.get_connector_class_by_name("KvtierConnector") is plugin.KvtierConnector

    with engine(model_folder(), server.unix, has_module_path=False) as llm:
        for _ in range(2):
            answer = ask_one(llm, _PROMPT)
    assert answer.num_cached >= 96
