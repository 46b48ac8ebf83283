"""What a model takes, against what it takes once it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.deploy.check.model_needs import read_model_needs
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.models.loading import load_model
from kvtier.testing.tiny_models import FAMILIES, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_model(made, "qwen2")
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"load_format": "dummy"}, {"dtype": "bfloat16"}, {"quantization": "fp8"}],
    ids=lambda settings: " ".join(settings.values()) or "plain",
)
def test_a_model_takes_what_it_takes_once_loaded(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, family)
    loaded = load_model(tmp_path, device="cpu", **settings)

    needs = read_model_needs(EngineConfig(model=str(tmp_path), **settings))

    assert needs is not None
    assert needs.architecture == loaded.config.architecture
    assert needs.weights_bytes == loaded.weights_bytes
    assert needs.kv_token_bytes == loaded.config.kv_layout(1, loaded.dtype).block_bytes


def test_shards_are_added_up(folder: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", max_shard_size=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    assert read_model_needs(EngineConfig(model=str(tmp_path))) == read_model_needs(EngineConfig(model=str(folder)))


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    loaded = load_model(tmp_path, device="cpu", load_format="dummy")

    needs = read_model_needs(EngineConfig(model=str(tmp_path), load_format="dummy"))

    assert needs is not None
    assert needs.weights_bytes == loaded.weights_bytes


def test_a_model_that_is_still_to_be_downloaded_is_not_known(tmp_path: Path) -> None:
    assert read_model_needs(EngineConfig(model="owner/model", cache_dir=str(tmp_path))) is None


def test_a_model_in_the_hub_s_cache_is_known(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    save_tiny_model(snapshot, "qwen3")
    references = tmp_path / "models--owner--model" / "refs"
    references.mkdir()
    (references / "main").write_text(snapshot.name)

    needs = read_model_needs(EngineConfig(model="owner/model", cache_dir=str(tmp_path)))

    assert needs is not None
    assert needs.architecture == "Qwen3ForCausalLM"


def test_what_the_engine_could_not_load_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_needs(EngineConfig(model=str(tmp_path)))

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no \*\.safetensors files"):
        read_model_needs(EngineConfig(model=str(tmp_path)))

    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        read_model_needs(EngineConfig(model=str(tmp_path)))


def test_a_missing_tokenizer_or_chat_template_is_noted(folder: Path, tmp_path: Path) -> None:
    def note() -> str:
        needs = read_model_needs(EngineConfig(model=str(tmp_path), load_format="dummy"))
        assert needs is not None
        return needs.note

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert note() == "it has no tokenizer: only prompts of token ids are answered"
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert note() == "it has no chat template: chat requests are refused, completions work"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert note() == ""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").touch()
    assert note() == ""
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }} {{ messages }}")
    assert note() == "its chat template writes the current date (strftime_now): prompts part when that changes"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ strftime_now(\'%d\') }}"}')
    assert "writes the current date" in note()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only for poets') }}", "only for poets"),
        ("{% for message in messages %}{{ message.content }}", "Unexpected end of template"),
        ("{{ messages[0].content / 2 }}", "unsupported operand"),
    ],
)
def test_a_chat_template_that_cannot_be_rendered_is_noted(
    folder: Path, tmp_path: Path, template: str, reason: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(template)

    needs = read_model_needs(EngineConfig(model=str(tmp_path), load_format="dummy"))

    assert needs is not None
    assert needs.note.startswith("its chat template cannot be rendered for a user's message: such chats are refused (")
    assert reason in needs.note
