"""All fixed limits of the HTTP server: sizes, counts and times.

docs/limits.md lists them together with the limits of `SamplingParams` and those that a deployment file sets.
"""

from __future__ import annotations

# --- what a body asks for ---------------------------------------------------------------------------------------------

MAX_PROMPTS = 1024
MAX_ANSWERS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of the content of one message."""

MAX_OPENAI_TEMPERATURE = 2.0
"""OpenAI's own limit. Ollama has none: its API accepts what `SamplingParams` accepts."""

MAX_CACHE_SALT_CHARACTERS = 256
MAX_RECORD_CHARACTERS = 1024
"""Limit for `user` and other texts that callers send for their own records."""

MAX_METADATA = 64
MAX_DETOKENIZED = 1 << 20
"""Tokens in one request for their text."""

MAX_TEMPLATE_DEPTH = 32
MAX_TEMPLATE_VALUES = 1024
MAX_TEMPLATE_CHARACTERS = 64 << 10
"""All names and texts in `chat_template_kwargs` together."""

MAX_INPUT_ITEMS = 16_384
"""Items in the input of one response, each a message or a part of one."""

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARACTERS = 256
MAX_CONTEXT_EDITS = 16
MAX_CALLS = 1024
MAX_CALL_COMMANDS = 4096
"""Commands, or words of one, of a shell's call in the history."""

MAX_SKILLS = 1024
"""Tool calls in one message."""

MAX_ID_CHARACTERS = 256
"""Limit for the id of a response, an item or a call."""

MAX_INNER_DEPTH = 64
MAX_INNER_VALUES = 65_536
"""Limits for the arguments of a call, and for a tool's schema."""

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 16_384
"""Limits for the JSON schema of an answer; values are objects, lists and plain values together."""

MAX_OUTPUT_CHOICES = 1024
"""Texts to which an answer may be restricted."""

MAX_REFERRING_BYTES = 4 << 20
"""Messages of an input that refers to items of earlier responses."""

CHARACTERS_PER_TOKEN = 1024
"""Text with more characters than this per token of the model's context is too long for any tokenizer."""

# --- how a request arrives -------------------------------------------------------------------------------------------

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
MAX_PIPELINED = 16
"""Requests that wait on a connection for an earlier one to be answered."""

NUM_FREE_CHUNKS = 4096
CHUNK_BYTES = 16
"""A body may have one chunk for each `CHUNK_BYTES`, plus `NUM_FREE_CHUNKS`."""

# --- how a body arrives -----------------------------------------------------------------------------------------------

INLINE_BODY_BYTES = 32 << 10
"""Bodies up to this size are read in the event loop: none takes longer than about two milliseconds."""

BODY_TIMEOUT_S = 120.0
"""Time from a request's head to the end of its body."""

SLOW_BODY_S = 1.0
"""Bodies that take longer may be ended in favour of others, the slowest first."""

MAX_SLOW_BODIES = 256
MAX_OPEN_BODIES = 4096
"""Bodies that arrive at a time: above `MAX_SLOW_BODIES`, slow ones are ended for new ones."""

OPEN_BODIES_OVER_LARGEST = 4
"""Limit for all arriving bodies together, as a multiple of the largest body."""

QUICK_BODY_BYTES = 1 << 20
"""Bodies up to this size, each read in about a tenth of a second at most, do not wait for larger ones."""

MAX_UNREAD_BODIES_BYTES = 256 << 20
"""Bodies that have arrived and wait to be read; those up to `QUICK_BODY_BYTES` and larger ones count separately."""

READ_TIMEOUT_S = 20.0
"""Time for reading a large body, once it has arrived and a process takes it."""

# --- how much is served ----------------------------------------------------------------------------------------------

ANSWERS_OVER_REQUESTS = 4
"""Limit for the answers of all requests in flight, as a multiple of the limit for requests."""

SERVED_PROMPTS_OVER_LARGEST = 2
"""Limit for the prompts of all requests in flight, as a multiple of the largest body."""

# --- how an answer leaves ---------------------------------------------------------------------------------------------

STREAM_STALL_S = 60.0
"""A stream whose client reads nothing for this long is ended."""

MAX_WHOLE_LOGPROBS_BYTES = 32 << 20
"""All log-probabilities in an answer that is not streamed, in JSON."""

MAX_UNREAD_PIECES = 4096
"""Pieces of the answers to one prompt that wait for a slow client: this many, or 64 per answer if that is more."""

UNREAD_PIECES_PER_ANSWER = 64
MAX_SUBMITS_UNDER_WAY = 64
"""Prompts of one request that may wait for an engine's acceptance; the others are sent as these are accepted."""

# --- stored responses ------------------------------------------------------------------------------------------------

MAX_STORED_RESPONSES = 16_384
MAX_STORED_BYTES = 256 << 20
"""All responses stored for `previous_response_id`; each API key has an equal share of both limits."""

STORED_S = 86_400.0
"""A response that is unused for this long is dropped."""

# --- wrong API keys ---------------------------------------------------------------------------------------------------

FIRST_WRONG_KEY_S = 0.1
LONGEST_WRONG_KEY_S = 5.0
"""An address's first wrong key is answered after `FIRST_WRONG_KEY_S`, each further one after twice that, up to this."""

WRONG_KEY_MEMORY_S = 300.0
"""After this long without a wrong key, an address's count starts again."""

MAX_WRONG_KEY_ADDRESSES = 4096
MAX_WRONG_KEYS_WAITING = 512
MAX_WRONG_KEYS_WAITING_OF_ONE = 8
"""Delayed answers to wrong keys at a time, for all addresses or for one; further wrong keys get 429 at once."""

# --- the page ---------------------------------------------------------------------------------------------------------

MAX_LOGGED_REQUESTS = 1000
"""Recent requests that the page shows."""

MAX_PAGE_SESSIONS = 1024
MAX_PAGE_SESSIONS_OF_KEY = 64
"""Open log-ins, of all API keys or of one; the oldest one is ended for a new one."""

PAGE_SESSION_S = 43_200.0
MAX_PAGE_READERS = 64
"""Browsers connected to the event stream at a time."""

PAGE_TICK_S = 2.0
"""Time between two events, which are the same bytes for all browsers."""

MAX_PAGE_EVENTS_UNREAD = 8
"""A browser with this many unread events is disconnected; it reconnects."""

MAX_TOLD_REQUESTS = 100
"""Requests in one event."""

MAX_PAGE_BODY_BYTES = 4 << 10
MAX_SHOWN_NAMESPACES = 200

# --- engines of vLLM --------------------------------------------------------------------------------------------------

MAX_UPSTREAM_HEAD_BYTES = 64 << 10
"""Limit for the head of an answer, including any informational responses before it."""

MAX_UNSENT_BYTES = 1 << 20
"""Bytes of an answer that wait for the client; reading from the engine pauses above that."""

HELD_ANSWER_BYTES = 1 << 20
"""An answer that is not streamed is passed on once it is complete or has this many bytes."""

MAX_TRANSLATED_BYTES = 64 << 20
"""Limit for an answer that is translated as a whole for Ollama's clients, and for one line of a stream."""

MAX_UPSTREAM_METRICS_BYTES = 16 << 20

FIRST_BYTE_S = 3600.0
"""Time to the first byte of an answer: prompts wait in the engine's queue, and whole answers take long."""

UPSTREAM_SILENCE_S = 600.0
"""Time between two bytes of an answer."""

HOLD_S = 120.0
"""How long a request waits for an engine to start or restart before it gets 503."""

MAX_LOST_ENGINES = 3
"""A request fails after this many engines died computing it: it may be the cause."""

MAX_PREFIX_KEYS = 512
"""Beginnings of a prompt that are looked up and recorded when an engine is picked."""

MAX_PLACED_RESPONSES = 65_536
"""Responses whose engine is recorded, so that clients can refer to them; each API key has an equal share."""

MAX_REMEMBERED_PREFIXES = 131_072
"""Beginnings recorded for each engine; the least recently used are dropped."""
