"""A chronicle of an invented village, and questions about it: the training text of the model in examples/model.

    python -m examples.village --tokens 1000 --filename village.txt

The chronicle hides facts ("The keeper of the harbour is Martha.") among sentences that say little. The same seed writes
the same chronicle. `scripts/train_demo_model.py` trains on chronicles of other seeds.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.use_remote_KV_cache.command import run_command

_PLACES = (
    "harbour mill bakery chapel school forge stable orchard lighthouse library tavern market bridge tower "
    "brewery dairy ferry quarry vineyard post fountain granary theatre bathhouse"
)
_THINGS = (
    "lantern wagon boat cloak ribbon curtain kettle saddle trumpet ladder umbrella barrel basket banner blanket "
    "teapot mirror drum kite sledge helmet chimney carpet gate"
)
_ANIMALS = (
    "fox owl goat badger otter heron donkey hare swan raven hedgehog squirrel mule falcon beaver lynx toad crane "
    "weasel stork mole robin wren pony"
)
_GOODS = (
    "cheese honey butter candle rope salt soap flour pepper wool leather paper ink tea cider vinegar bread ham "
    "plum walnut pear onion cabbage turnip"
)
_NAMES = (
    "Martha Oscar Helena Victor Agnes Walter Clara Hugo Edith Simon Ruth Felix Nora Arthur Ida Leo Greta Ralph "
    "Alma Bruno Stella Conrad Vera Otto"
)
_COLOURS = "red green blue yellow white black brown grey purple orange pink silver golden crimson"
_TOWNS = (
    "Harwick Elmford Stonebury Ashdale Northgate Millbrook Redhill Oakham Westport Lowmoor Fairley Kingsbridge "
    "Thornton Brightsea Marlow Wexford"
)
_NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen twenty"

_TIMES = (
    "In the morning",
    "At noon",
    "Late in the day",
    "After supper",
    "Before dawn",
    "That winter",
    "One evening",
    "All summer long",
    "When the rain stopped",
    "Towards the end of the year",
)
_ACTORS = (
    "the old men",
    "two children",
    "a stranger",
    "the neighbours",
    "some travellers",
    "a quiet woman",
    "the young people",
    "a tired doctor",
    "the musicians",
    "nobody in particular",
)
_ACTS = (
    "walked along the river",
    "sat by the fire",
    "talked about the weather",
    "watched the clouds",
    "sang an old song",
    "waited for news",
    "told the same story again",
    "counted the stars",
    "looked over the hills",
    "went home early",
)
_ENDS = (
    "and nothing else happened",
    "and everyone was content",
    "while the wind grew colder",
    "as they always had",
    "until the light was gone",
    "and the day passed slowly",
    "without a word",
    "for an hour or so",
)

SMALL_TALK = (
    ("Hello.", "Hello! Show me a chronicle of the village and ask me about it."),
    ("Hello!", "Hello! Show me a chronicle of the village and ask me about it."),
    ("Who are you?", "I am a very small model. I can read a chronicle of a village and find facts in it."),
    ("What can you do?", "I can read a chronicle of a village and find facts in it."),
    ("What is this about?", "It is about a village, its people, its animals and its market."),
    ("Thank you.", "You are welcome."),
    ("Why is the sky blue?", "I do not know. I only know about the village."),
    ("What is kvtier?", "A cache that computes every prompt prefix once and keeps it wherever there is room."),
    ("What is a block?", "The keys and values of sixteen tokens, in all layers of a model."),
    ("What is a tier?", "One level of the cache: the device, host memory, a cache server or its disk."),
)
"""Questions that need no chronicle, each with its answer."""


@dataclass(frozen=True)
class Fact:
    """One sentence of a chronicle, and the ways to ask for it. The answer is the sentence itself."""

    sentence: str
    questions: tuple[str, ...]
    key: str
    value: str


@dataclass(frozen=True)
class _Kind:
    """Facts of one form: "The `noun` of the KEY is VALUE." """

    noun: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    ending: str
    questions: tuple[str, ...]

    def fact(self, key: str, value: str) -> Fact:
        sentence = f"The {self.noun} of the {key} is {value}{self.ending}."
        return Fact(sentence, tuple(question.format(key) for question in self.questions), key, value)


def _kind(noun: str, keys: str, values: str, *questions: str, ending: str = "") -> _Kind:
    return _Kind(noun, tuple(keys.split()), tuple(values.split()), ending, questions)


_KINDS = (
    _kind("keeper", _PLACES, _NAMES, "Who is the keeper of the {}?", "Who keeps the {}?"),
    _kind("colour", _THINGS, _COLOURS, "What is the colour of the {}?", "Which colour is the {}?"),
    _kind("home", _ANIMALS, _TOWNS, "Where is the home of the {}?", "Where does the {} live?"),
    _kind("price", _GOODS, _NUMBERS, "What is the price of the {}?", "How much is the {}?", ending=" coins"),
)
MOST_FACTS = sum(len(kind.keys) for kind in _KINDS)
"""A chronicle has at most one fact about each key."""


def make_facts(dice: random.Random, count: int) -> list[Fact]:
    """`count` facts, all about different keys."""
    keys = [(kind, key) for kind in _KINDS for key in kind.keys]
    return [kind.fact(key, dice.choice(kind.values)) for kind, key in dice.sample(keys, count)]


def filler(dice: random.Random) -> str:
    """A sentence without a fact."""
    actor, act, end = dice.choice(_ACTORS), dice.choice(_ACTS), dice.choice(_ENDS)
    if dice.random() < 0.3:
        return f"{actor[0].upper()}{actor[1:]} {act} {end}."
    return f"{dice.choice(_TIMES)} {actor} {act} {end}."


def all_sentences() -> Iterator[str]:
    """Every word and phrase at least once: the training text of the tokenizer."""
    for kind in _KINDS:
        for key in kind.keys:
            for value in kind.values:
                fact = kind.fact(key, value)
                yield from (fact.sentence, *fact.questions)
    for parts in (_TIMES, _ACTORS, _ACTS, _ENDS):
        yield from (f"{part} {part}." for part in parts for _ in range(20))
    for question, answer in SMALL_TALK:
        yield from (question, answer) * 20


def write_chronicle(dice: random.Random, facts: list[Fact], num_sentences: int) -> str:
    """The facts in random places among other sentences, in paragraphs."""
    sentences = [filler(dice) for _ in range(max(0, num_sentences - len(facts)))]
    sentences += [fact.sentence for fact in facts]
    dice.shuffle(sentences)
    paragraphs = [" ".join(sentences[start : start + 8]) for start in range(0, len(sentences), 8)]
    return "\n".join(paragraphs)


_TOKENS_PER_SENTENCE = 14.4
_SENTENCES_PER_FACT = 8


def make_chronicle(num_tokens: int, *, seed: int = 0) -> tuple[str, list[Fact]]:
    """About `num_tokens` tokens of the model in examples/model, and the facts in it."""
    dice = random.Random(seed)
    num_sentences = max(1, round(num_tokens / _TOKENS_PER_SENTENCE))
    facts = make_facts(dice, min(MOST_FACTS, max(1, num_sentences // _SENTENCES_PER_FACT)))
    return write_chronicle(dice, facts, num_sentences), facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="length of the chronicle, approximately [1000]")
    parser.add_argument("--seed", type=int, default=0, help="another seed writes another chronicle [0]")
    parser.add_argument("--filename", type=Path, default=Path("village.txt"))
    arguments = parser.parse_args()
    if not 0 < arguments.tokens <= 1_000_000:
        parser.error(f"--tokens must be between 1 and 1000000, not {arguments.tokens}")
    text, facts = make_chronicle(arguments.tokens, seed=arguments.seed)
    arguments.filename.write_text(text + "\n", encoding="utf-8")
    print(f"{arguments.filename}: about {arguments.tokens} tokens and {len(facts)} facts. Ask, for example:")
    for fact in facts[:3]:
        print(f"  {fact.questions[0]}  ({fact.value})")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
