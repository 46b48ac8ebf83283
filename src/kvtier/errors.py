"""Every error kvtier raises on purpose.

    KvtierError
    ├── ConfigError (also ValueError)      a setting, an address or an argument that cannot work
    ├── MissingExtra (also ImportError)    a part of kvtier that is not installed
    ├── CapacityError
    │   └── TierFull                       a tier has no room: all of it is leased, pinned or over a limit
    ├── TierError
    │   ├── TierTimeout                    no answer within the deadline
    │   ├── TierUnavailable                the tier does not answer, or the breaker is open
    │   ├── TierRefused                    the peer understood and said no: token, block size, limit
    │   └── BlockCorrupt                   bytes that differ from those written
    ├── ProtocolError
    │   ├── LocalProtocolError             our bug
    │   └── RemoteProtocolError            the peer's bug, or bytes that are not ours
    ├── LeaseError                         use after release, or release while views are in use
    ├── EngineStopped                      the engine has failed or was closed: no more answers
    │   └── EngineAway                     its process is starting, restarting or dead: retry later
    ├── AnswerFailed                       the engine failed at this request, and at no other
    └── RequestError                       a request that cannot be served as asked: the caller's to change
        ├── PromptTooLong                  more tokens than the model or the cache can hold
        ├── UnknownModel                   no model of that name is served
        └── InvalidParameter               a sampling parameter out of its range, or of the wrong type
            └── InvalidGrammar             no answer can follow the grammar

A miss is not an error. A tier's failure never fails a request: the caller counts it and continues.
"""

from __future__ import annotations


class KvtierError(Exception):
    """The root of the tree."""


class ConfigError(KvtierError, ValueError):
    """A setting, an address or an argument that cannot work."""


class MissingExtra(KvtierError, ImportError):
    """A name that needs packages which are not installed. `name` is the module that was not found."""

    def __init__(self, wanted: str, extra: str, missing: str | None) -> None:
        needs = f"{missing}, which is not installed" if missing else "packages that are not installed"
        super().__init__(f"{wanted} needs {needs}: pip install 'kvtier[{extra}]'")
        self.name = missing


class CapacityError(KvtierError):
    """There is no room."""


class TierFull(CapacityError):
    """A tier has no room: what it holds is leased, pinned, or the caller is over its limit."""


class TierError(KvtierError):
    """A tier did not do what it was asked. `kind` is the label of the failure's counter."""

    kind = "error"


class TierTimeout(TierError):
    """No answer within the deadline."""

    kind = "timeout"


class TierUnavailable(TierError):
    """The tier does not answer, or its breaker is open."""

    kind = "unavailable"


class TierRefused(TierError):
    """The peer understood the request and refused it; retrying will not help."""

    kind = "refused"


class BlockCorrupt(TierError):
    """The bytes read differ from those written. They were not passed on."""

    kind = "corrupt"


class ProtocolError(KvtierError):
    """Bytes or messages that do not follow the protocol."""


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol ourselves."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; its connection is no longer usable."""


class LeaseError(KvtierError):
    """A lease or reservation was used after its end, or ended while its views are in use."""


class EngineStopped(KvtierError):
    """The engine has failed or was closed; requests are no longer served."""


class EngineAway(EngineStopped):
    """The engine's process is starting or has died. It comes back by itself: retry after `retry_after_s`."""

    retry_after_s = 2


class AnswerFailed(KvtierError):
    """The engine failed at this request, and serves all others. The same request will most likely fail again."""


class RequestError(KvtierError):
    """A request cannot be served as it is; nothing was changed, and the caller can change the request."""


class PromptTooLong(RequestError):
    """The prompt, or the prompt and what may follow it, exceeds what the model or the cache can hold."""


class UnknownModel(RequestError):
    """No model of that name is served here."""


class InvalidParameter(RequestError, ValueError):
    """A parameter of a request is out of its range or of the wrong type; the sentence names it."""


class InvalidGrammar(InvalidParameter):
    """A grammar, or a schema, that no answer can follow. `field` of the request has it, if known."""

    def __init__(self, sentence: str, field: str = "") -> None:
        super().__init__(sentence)
        self.field = field
