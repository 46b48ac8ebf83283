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
MAX_TEMPLATE_DEPTH = 32
MAX_TEMPLATE_VALUES = 1024
MAX_TEMPLATE_CHARACTERS = 64 << 10
"""Of all names and texts in `chat_template_kwargs`."""

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
"""Bodies that take longer give way to others, those first of which least arrives in a second."""

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
"""A stream of which nothing is read for so long is ended."""

MAX_WHOLE_LOGPROBS_BYTES = 32 << 20
"""Of all logprobs in an answer that is not streamed, in JSON."""

MAX_UNREAD_PIECES = 4096
"""Pieces of the answers to one prompt that wait for a client who reads slowly; 64 for each answer, if that is more."""

UNREAD_PIECES_PER_ANSWER = 64
MAX_SUBMITS_UNDER_WAY = 64
"""Prompts of one request that are on their way to an engine; its others follow as those are accepted."""

# --- wrong API keys ---------------------------------------------------------------------------------------------------

FIRST_WRONG_KEY_S = 0.1
LONGEST_WRONG_KEY_S = 5.0
"""The answer to an address's first wrong key takes `FIRST_WRONG_KEY_S`, each further one twice as long, up to this."""

WRONG_KEY_MEMORY_S = 300.0
"""After so long without a wrong key an address begins anew."""

MAX_WRONG_KEY_ADDRESSES = 4096
MAX_WRONG_KEYS_WAITING = 512
MAX_WRONG_KEYS_WAITING_OF_ONE = 8
"""Answers to wrong keys, of all addresses or of one, that are held back at a time; further ones get 429 at once."""

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
"""A request waits so long for an engine that starts or restarts; then it gets 503."""

MAX_LOST_ENGINES = 3
"""A request at which so many engines died is given up: it may be the reason."""

MAX_PREFIX_KEYS = 512
"""Beginnings of a prompt that are looked for, and remembered, when an engine is picked."""

MAX_REMEMBERED_PREFIXES = 131_072
"""Of each engine; the least recently used are forgotten."""
