"""Ask a running deployment about a document, and show the answer and where the document's KV came from.

    python -m examples.ask --filename village.txt "Who is the keeper of the mill?"

Waits for a deployment that is still starting.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from examples.use_remote_KV_cache.asking import DEFAULT_URL, ask, ready_since
from examples.use_remote_KV_cache.command import base_url, run_command

_LOOK_S = 0.2


def wait_until_ready(url: str, wait_s: float) -> None:
    """Returns when every engine is ready, or after `wait_s`: the question then fails with the reason."""
    deadline = time.monotonic() + wait_s
    while ready_since(url) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--filename", type=Path, help="the document [none]")
    parser.add_argument("--model", default="village", help="as the deployment calls it [village]")
    parser.add_argument("--max-tokens", type=int, default=40, help="length of the answer at most [40]")
    parser.add_argument("--url", type=base_url, default=DEFAULT_URL, help=f"the OpenAI API's address [{DEFAULT_URL}]")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for a deployment that starts [120]")
    arguments = parser.parse_args()
    document = arguments.filename.read_text(encoding="utf-8") if arguments.filename else ""
    wait_until_ready(arguments.url, arguments.wait)
    answer = ask(arguments.url, arguments.model, document, question=arguments.question, max_tokens=arguments.max_tokens)
    print(answer.text)
    print(f"  first token after {answer.ttft_s:.3f} s; {answer.prompt_tokens} prompt tokens: {answer.sources}")
    print(f"  request id: {answer.request_id}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
