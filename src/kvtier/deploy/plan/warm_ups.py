"""From the file's `warm` to the prefixes that the HTTP server puts into the cache when it starts."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from kvtier.api.config import ApiKey, ServedModelConfig, WarmUp
from kvtier.api.prefixes.record import MAX_DOCUMENTS
from kvtier.deploy.file.form import absolute, is_short_path
from kvtier.deploy.file.named_file import require_file
from kvtier.deploy.file.native import Deployment, WarmSection
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.yaml_file import Location
from kvtier.durations import parse_duration


def plan_warm_ups(
    deployment: Deployment, origin: Origin, models: Sequence[ServedModelConfig], keys: Sequence[ApiKey]
) -> tuple[WarmUp, ...]:
    """Raises `ConfigError`, with lines."""
    found: list[WarmUp] = []
    for number, section in enumerate(deployment.warm):
        place: Location = ("warm", number)
        if any(section.name == other.name for other in found):
            raise origin.wrong(place, f"two prefixes are called {section.name!r}: give each a name of its own")
        require_file(origin, place, "system", section.system)
        found.append(
            WarmUp(
                name=section.name,
                model=_model(section, place, origin, models),
                documents=_documents(section, place, origin),
                system=section.system,
                pin=section.pin,
                ttl_s=None if section.ttl is None else parse_duration(section.ttl),
                force=section.force,
                key=_key(section, place, origin, keys),
            )
        )
    return tuple(found)


def _model(section: WarmSection, place: Location, origin: Origin, models: Sequence[ServedModelConfig]) -> str:
    known = ", ".join(model.names[0] for model in models)
    if section.model is None and len(models) > 1:
        raise origin.wrong(place, f"model must say which one: there is {known}")
    model = next((one for one in models if section.model is None or section.model in one.names), None)
    if model is None:
        raise origin.wrong(place, f"there is no model {section.model!r}; there is {known}", about="model")
    if model.cache is None:
        reason = "vLLM runs it" if model.is_vllm else "it has no cache server"
        raise origin.wrong(place, f"{model.names[0]} cannot be warmed: {reason}", about="model")
    return model.names[0]


def _key(section: WarmSection, place: Location, origin: Origin, keys: Sequence[ApiKey]) -> str:
    """Empty without keys."""
    known = ", ".join(key.name for key in keys)
    if section.key is None and keys:
        raise origin.wrong(place, f"key must say which API key's chats begin so: there is {known}")
    if section.key is not None and section.key not in [key.name for key in keys]:
        there = f"there is {known}" if keys else "the file has none"
        raise origin.wrong(place, f"there is no API key {section.key!r}; {there}", about="key")
    return section.key or ""


def _documents(section: WarmSection, place: Location, origin: Origin) -> tuple[Path, ...]:
    paths: list[Path] = []
    for pattern in section.documents:
        if not is_short_path(pattern) or "\0" in pattern:
            raise origin.wrong(place, "documents must be paths, with names of at most 255 bytes", about="documents")
        whole = str(origin.file.path.parent / Path(pattern).expanduser())
        is_pattern = glob.has_magic(whole)
        matched = [Path(one) for one in sorted(glob.iglob(whole, recursive=False))] if is_pattern else [Path(whole)]
        files = [absolute(path) for path in matched if path.is_file()]
        if not files:
            raise origin.wrong(place, f"documents: there is no file {pattern}", about="documents")
        paths += files
        if len(paths) > MAX_DOCUMENTS:
            raise origin.wrong(place, f"documents must not be more than {MAX_DOCUMENTS}", about="documents")
    return tuple(paths)
