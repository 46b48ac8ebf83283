"""The place of each section of a deployment in its file, in either form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.deploy.file.form import words_of
from kvtier.deploy.file.yaml_file import Location, YamlFile
from kvtier.errors import ConfigError

_OTHER_WORDS = {
    "token": "token_file",
    "certificate": "tls_cert",
    "max_payload_bytes": "max_frame",
    "max_leased_bytes": "max_leased",
    "max_body_bytes": "max_body",
}
"""The names of fields in the parts' own settings."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The places of models and caches, in the deployment's order. `renamed` are fields with other names in this form.

    A field that is missing from a model's or a cache's `engine_args` may be beside them.
    """

    file: YamlFile
    models: tuple[Location, ...]
    caches: tuple[Location, ...]
    http: Location = ("http",)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def find(self, section: Location, name: str) -> Location | None:
        """The place of the field `name` of a section, if it is given."""
        name = _OTHER_WORDS.get(name, name)
        places = [(*section, self.renamed.get(name, name)), (*section, name)]
        if section[-1] == "engine_args":
            places.append((*section[:-1], name))
        return next((place for place in places if self.file.has(place)), None)

    def wrong(self, section: Location, text: str, *, about: str | None = None) -> ConfigError:
        """An error with `text` and the line of the field `about`, or of the first that it names, or of the section."""
        places = (self.find(section, name) for name in ([about] if about else words_of(text)))
        return self.file.error(next((place for place in places if place is not None), section), text)
