"""How much of anything a client may ask for, and for how long: every limit of HTTP that no setting changes.

docs/limits.md has them in one table, with those of `SamplingParams` and those that a deployment file sets.
"""

from __future__ import annotations

# --- what a body asks for ---------------------------------------------------------------------------------------------

MAX_PROMPTS = 1024
MAX_ANSWERS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of the content of one message."""

MAX_OPENAI_TEMPERATURE = 2.0
"""OpenAI's own bound. Ollama has none: its API accepts what `SamplingParams` does."""

MAX_CACHE_SALT_CHARACTERS = 256
MAX_RECORD_CHARACTERS = 1024
"""Of `user` and other texts that callers send for their own records."""

MAX_METADATA = 64
MAX_DETOKENIZED = 1 << 20
"""Tokens whose text is asked for in one go."""

MAX_TEMPLATE_DEPTH = 32
MAX_TEMPLATE_VALUES = 1024
MAX_TEMPLATE_CHARACTERS = 64 << 10
"""Of all names and texts in `chat_template_kwargs`."""

MAX_INPUT_ITEMS = 16_384
"""Items of the input of one response, each a message or a part of one."""

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARACTERS = 256
MAX_CONTEXT_EDITS = 16
MAX_CALLS = 1024
"""Calls of one message."""

MAX_ID_CHARACTERS = 256
"""Of the id of a response, an item or a call."""

MAX_INNER_DEPTH = 64
MAX_INNER_VALUES = 65_536
"""Of the arguments of a call, and of a schema."""

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 16_384
"""Of a JSON schema for an answer: objects, lists and plain values, all together."""

MAX_OUTPUT_CHOICES = 1024
"""Texts an answer may be restricted to."""

MAX_REFERRING_BYTES = 4 << 20
"""Of the messages of an input that refers to items of earlier responses."""

CHARACTERS_PER_TOKEN = 1024
"""Text with more characters than this for each token of the model's context is too long, whatever the tokenizer."""

# --- how a request arrives -------------------------------------------------------------------------------------------

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
MAX_PIPELINED = 16
"""Requests that wait on a connection while one before them is answered."""

NUM_FREE_CHUNKS = 4096
CHUNK_BYTES = 16
"""A body may have one chunk for each `CHUNK_BYTES`, and `NUM_FREE_CHUNKS` besides."""

# --- how a body arrives -----------------------------------------------------------------------------------------------

INLINE_BODY_BYTES = 32 << 10
"""Bodies up to this size are read where they arrive: none takes longer than about two milliseconds."""

BODY_TIMEOUT_S = 120.0
"""From a request's head to the end of its body."""

SLOW_BODY_S = 1.0
"""Slower bodies give way to others, the slowest first."""

MAX_SLOW_BODIES = 256
MAX_OPEN_BODIES = 4096
"""Bodies that arrive at a time, slow or not."""

OPEN_BODIES_OVER_LARGEST = 4
"""Bodies that arrive hold, together, at most this many times the largest body."""

QUICK_BODY_BYTES = 1 << 20
"""Bodies up to this size, of which none takes longer than about a tenth of a second, do not wait for larger ones."""

MAX_UNREAD_BODIES_BYTES = 256 << 20
"""Bodies that have arrived and wait to be read, those up to `QUICK_BODY_BYTES` and the others apart."""

READ_TIMEOUT_S = 20.0
"""For reading a large body, once it has arrived and it is its turn."""

# --- how much is served ----------------------------------------------------------------------------------------------

ANSWERS_OVER_REQUESTS = 4
"""Requests that are served have, together, at most this many times as many answers as there may be requests."""

SERVED_PROMPTS_OVER_LARGEST = 2
"""Their prompts take, together, at most this many times the largest body."""

# --- how an answer leaves ---------------------------------------------------------------------------------------------

STREAM_STALL_S = 60.0
"""A stream whose client reads nothing for this long is ended."""

MAX_WHOLE_LOGPROBS_BYTES = 32 << 20
"""Of all logprobs in an answer that is not streamed, in JSON."""

MAX_UNREAD_PIECES = 4096
"""Pieces of the answers to one prompt that wait for a slow client; 64 for each answer, if that is more."""

UNREAD_PIECES_PER_ANSWER = 64
MAX_SUBMITS_UNDER_WAY = 64
"""Prompts of one request that are on their way to an engine; its others follow as those are accepted."""

# --- responses that are kept -----------------------------------------------------------------------------------------

MAX_STORED_RESPONSES = 16_384
MAX_STORED_BYTES = 256 << 20
"""Of all responses that are kept for `previous_response_id`; each API key has an equal share of both."""

STORED_S = 86_400.0
"""A response unused for this long is forgotten."""

# --- wrong API keys ---------------------------------------------------------------------------------------------------

FIRST_WRONG_KEY_S = 0.1
LONGEST_WRONG_KEY_S = 5.0
"""The answer to an address's first wrong key takes `FIRST_WRONG_KEY_S`, each further one twice as long, up to this."""

WRONG_KEY_MEMORY_S = 300.0
"""After this long without a wrong key an address starts afresh."""

MAX_WRONG_KEY_ADDRESSES = 4096
MAX_WRONG_KEYS_WAITING = 512
MAX_WRONG_KEYS_WAITING_OF_ONE = 8
"""Answers to wrong keys, of all addresses or of one, that are held back at a time; further ones get 429 at once."""

# --- the page ---------------------------------------------------------------------------------------------------------

MAX_LOGGED_REQUESTS = 1000
"""The last requests that the page shows."""

MAX_PAGE_SESSIONS = 1024
MAX_PAGE_SESSIONS_OF_KEY = 64
"""Log-ins that are open at a time, of all API keys or of one; the oldest ends first."""

PAGE_SESSION_S = 43_200.0
MAX_PAGE_READERS = 64
"""Browsers that follow what changes at a time."""

PAGE_TICK_S = 2.0
"""How often they are told, all of them with the same bytes."""

MAX_PAGE_EVENTS_UNREAD = 8
"""A browser that has so many events to read yet is dropped; it asks again."""

MAX_TOLD_REQUESTS = 100
"""Requests in one event."""

MAX_PAGE_BODY_BYTES = 4 << 10
MAX_SHOWN_NAMESPACES = 200

# --- engines of vLLM --------------------------------------------------------------------------------------------------

MAX_UPSTREAM_HEAD_BYTES = 64 << 10
"""Of the head of an answer, and of what comes before one."""

MAX_UNSENT_BYTES = 1 << 20
"""Bytes of an answer that wait for the client; no more is read from the engine meanwhile."""

HELD_ANSWER_BYTES = 1 << 20
"""An answer that is not streamed is passed on once it is complete, or has this many bytes."""

MAX_TRANSLATED_BYTES = 64 << 20
"""Of an answer that is translated as a whole for Ollama's clients, and of one line of a stream."""

MAX_UPSTREAM_METRICS_BYTES = 16 << 20

FIRST_BYTE_S = 3600.0
"""For the first byte of an answer: prompts wait in the engine's queue, and whole answers take their time."""

UPSTREAM_SILENCE_S = 600.0
"""Between two bytes of an answer that has begun."""

HOLD_S = 120.0
"""How long a request waits for an engine that starts or restarts before it gets 503."""

MAX_LOST_ENGINES = 3
"""A request is given up after this many engines died at it: it may be the reason."""

MAX_PREFIX_KEYS = 512
"""Beginnings of a prompt that are looked for, and remembered, when an engine is picked."""

MAX_REMEMBERED_PREFIXES = 131_072
"""Of each engine; the least recently used are forgotten."""
