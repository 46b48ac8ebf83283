"""Write a long document of random words.

python -m examples.use_remote_KV_cache.make_dummy_inputs --model MODEL --length 100000 --filename dummy.txt
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from examples.use_remote_KV_cache.command import run_command
from kvtier.models.hub import find_model_folder
from kvtier.models.tokenizer import Tokenizer

_TEXT = (
    "river mountain city winter summer letter window garden answer question machine memory silver morning evening "
    "harbour station journey village kitchen library music painter doctor teacher number island forest bridge road"
)
_WORDS = _TEXT.split()
_MODEL = str(Path(__file__).resolve().parents[1] / "model")
_SAMPLE_WORDS = 2000


def make_document(tokenizer: Tokenizer, num_tokens: int, *, seed: int = 0) -> str:
    """Sentences of random words; the same `seed` writes the same document."""
    dice = random.Random(seed)
    sample = _sentences(dice, _SAMPLE_WORDS)
    per_word = len(tokenizer.encode(sample, add_special_tokens=False)) / _SAMPLE_WORDS
    return _sentences(dice, max(1, round(num_tokens / per_word)))


def _sentences(dice: random.Random, num_words: int) -> str:
    words = [dice.choice(_WORDS) for _ in range(num_words)]
    return " ".join(
        word.capitalize() + ("." if number % 12 == 11 else "") if number % 12 in (0, 11) else word
        for number, word in enumerate(words)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=_MODEL, help="a folder or a hub name, whose tokenizer counts the tokens [examples/model]"
    )
    parser.add_argument("--length", type=int, default=100_000, help="number of tokens, approximately")
    parser.add_argument("--filename", type=Path, default=Path("dummy.txt"))
    arguments = parser.parse_args()
    if arguments.length <= 0:
        parser.error(f"--length must be positive, not {arguments.length}")
    tokenizer = Tokenizer(find_model_folder(arguments.model, has_weights=False))
    document = make_document(tokenizer, arguments.length)
    arguments.filename.write_text(document, encoding="utf-8")
    count = len(tokenizer.encode(document, add_special_tokens=False))
    print(f"{arguments.filename}: {count} tokens, {len(document)} characters")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
