"""The fields that each namespace covers, as clients describe them: they show in which fields two namespaces differ.

Guarded by the catalog's lock. A client may write anything here: it is bounded, shown, and used for nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from kvtier.blocks.namespace import Namespace

_MAX_CHARS = 1 << 20
_MAX_TENANT_CHARS = 128 << 10


class NamespaceDescriptions:
    """JSON text by namespace: at most `max_chars` for the server's owner, and `max_tenant_chars` for each tenant.

    Past that, the same tenant's least recently described namespace is forgotten.
    """

    def __init__(self, max_chars: int = _MAX_CHARS, max_tenant_chars: int = _MAX_TENANT_CHARS) -> None:
        self._max_chars = max_chars
        self._max_tenant_chars = max_tenant_chars
        self._texts: dict[str, OrderedDict[Namespace, str]] = {}
        self._num_chars: Counter[str] = Counter()
        self._tenant_of: dict[Namespace, str] = {}
        self._to_check: list[Namespace] = []

    def keep(self, namespace: Namespace, text: str, tenant: str = "") -> None:
        """Keep `text` for a namespace of `tenant` (by default the owner), unless it has a text already."""
        if namespace in self._tenant_of:
            self._texts[self._tenant_of[namespace]].move_to_end(namespace)
            return
        texts = self._texts.setdefault(tenant, OrderedDict())
        texts[namespace] = text
        self._tenant_of[namespace] = tenant
        self._num_chars[tenant] += len(text)
        while self._num_chars[tenant] > (self._max_tenant_chars if tenant else self._max_chars):
            self._forget(next(iter(texts)))

    def get(self, namespace: Namespace) -> str | None:
        """As it was kept."""
        tenant = self._tenant_of.get(namespace)
        return None if tenant is None else self._texts[tenant][namespace]

    def forget_unless(self, is_known: Callable[[Namespace], bool], max_checked: int) -> None:
        """Forget namespaces that are gone. Each call checks at most `max_checked`; successive calls check them all."""
        if not self._to_check:
            self._to_check = list(self._tenant_of)
        for namespace in self._to_check[-max_checked:]:
            if namespace in self._tenant_of and not is_known(namespace):
                self._forget(namespace)
        del self._to_check[-max_checked:]

    def _forget(self, namespace: Namespace) -> None:
        tenant = self._tenant_of.pop(namespace)
        self._num_chars[tenant] -= len(self._texts[tenant].pop(namespace))
        if not self._texts[tenant]:
            del self._texts[tenant]
