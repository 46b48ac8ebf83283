"""Trains the model in examples/model: `python scripts/train_demo_model.py --folder examples/model`.

It needs torch and about four minutes of one CPU core. The model has the shape of a Llama with a million parameters, and
learns one thing: to find a fact in a chronicle (`examples/village.py`) and to say it. All its text is generated, so
there is nothing to download and no licence but this project's. The same seed, with the same torch on the same kind of
CPU, trains the same weights.

Four things make that enough. Only the answers' tokens count for the loss. A chronicle is asked about many times.
Two heads begin with the attention that looking a fact up needs (`Model._plant_retrieval`). And positions jump between
sentences, so that texts of 250 tokens teach distances of thousands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.village import MOST_FACTS, SMALL_TALK, Fact, all_sentences, make_chronicle, make_facts, write_chronicle  # noqa: E402

VOCAB_SIZE = 1152
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 320, 4, 4, 2, 64
MAX_POSITIONS = 16384
ROPE_THETA = 1e7
EPSILON = 1e-6
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# -- The tokenizer ---------------------------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text can be written, and the chronicle's words are one token each, or two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_sentences(), trainer)
    return tokenizer


# -- The model -------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and MLP, with the names that a Llama checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPSILON)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False),
                "k_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "v_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "o_proj": nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN, MLP, bias=False),
                "up_proj": nn.Linear(HIDDEN, MLP, bias=False),
                "down_proj": nn.Linear(MLP, HIDDEN, bias=False),
            }
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.input_layernorm(hidden), cos, sin)
        normed = self.post_attention_layernorm(hidden)
        inner = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return hidden + self.mlp["down_proj"](inner)

    def _attend(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            self.self_attn[name](hidden).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, before_value: int) -> None:
        """`before_value` is the token before the value of a fact, used to count the facts found."""
        super().__init__()
        self.before_value = before_value
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPSILON)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.002 if "o_proj" in name or "down_proj" in name else 0.02)
        self._plant_retrieval()

    @torch.no_grad()
    def _plant_retrieval(self) -> None:
        """Begin with the attention that a fact needs: "The keeper of the harbour is" looks for "harbour is ...".

        Layer 0 notes at each token the token before it and the one before that. A head of layer 1 asks for tokens whose
        one before the last is this token's last, and says them. Learning that from nothing would take hours.
        """
        constant, content = 0, slice(1, 64)
        notes = (slice(64, 96), slice(96, 128))
        embedding = self.embed_tokens.weight
        embedding[:, constant], embedding[:, 64:] = 0.35, 0.0
        embedding[:, content].normal_(std=0.08)
        half, fast = HEAD_DIM // 2, 6
        first, second = self.layers[0].self_attn, self.layers[1].self_attn
        frequencies = ROPE_THETA ** (-torch.arange(fast) / half)
        for back, note in enumerate(notes, 1):
            query, key = (back - 1) * 2 * HEAD_DIM, (back - 1) * HEAD_DIM  # two heads share a key
            first["k_proj"].weight[key : key + fast, constant] += 1.8
            first["q_proj"].weight[query : query + fast, constant] += 1.8 * torch.cos(back * frequencies)
            first["q_proj"].weight[query + half : query + half + fast, constant] += -1.8 * torch.sin(back * frequencies)
            first["v_proj"].weight[key : key + 32, 1:33] += torch.eye(32)
            first["o_proj"].weight[note, query : query + 32] += 0.064 * torch.eye(32)
        slow = [*range(half - 12, half), *range(HEAD_DIM - 12, HEAD_DIM)]
        for place, number in enumerate(slow):
            second["q_proj"].weight[number, notes[0].start + place] += 2.3
            second["k_proj"].weight[number, notes[1].start + place] += 2.3
        second["v_proj"].weight[:63, content] += torch.eye(63)
        second["o_proj"].weight[content, :63] += 0.13 * torch.eye(63)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states; the head is the embedding again, and is left to the caller, who needs few rows of it."""
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = (positions[:, None, :, None] * frequencies).float()
        cos, sin = angles.cos(), angles.sin()
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


# -- Training text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A conversation about one chronicle. Only `is_answer` tokens are learned; positions jump between sentences."""

    tokens: list[int]
    is_answer: list[bool]
    positions: list[int]


@dataclass(frozen=True)
class Stage:
    """`reach` is how far positions may jump in all."""

    steps: int
    batch: int
    tokens: int
    rate: float
    reach: int


class Writer:
    def __init__(self, tokenizer: Tokenizer, dice: random.Random) -> None:
        self._dice = dice
        self._ids: dict[str, list[int]] = {}
        self._tokenizer = tokenizer
        self._end, self._user, self._assistant = (tokenizer.token_to_id(token) for token in (END, USER, ASSISTANT))
        self._sentence_ends = {token for text in (".", "\n") for token in self._encode(text)}

    def sample(self, num_tokens: int, reach: int) -> Sample:
        """Exactly `num_tokens`: about half a chronicle, the rest questions."""
        dice = self._dice
        facts = make_facts(dice, dice.randint(2, min(MOST_FACTS, max(3, num_tokens // 16))))
        num_sentences = len(facts) + dice.randint(0, max(1, num_tokens // 40))
        chronicle = self._encode(write_chronicle(dice, facts, num_sentences) + "\n\n")
        chronicle = chronicle[: num_tokens // 2]
        known = [fact for fact in facts if self._has(chronicle, fact.sentence)] or facts[:1]
        dice.shuffle(known)
        asked_about = itertools.cycle(known)
        tokens, is_answer = [self._user, *chronicle], [False] * (1 + len(chronicle))
        while len(tokens) < num_tokens:
            if len(tokens) > 1 + len(chronicle):
                tokens.append(self._user)
                is_answer.append(False)
            question, answer = self._question(next(asked_about))
            asked, said = self._encode(question), self._encode(answer)
            tokens += [*asked, self._end, self._assistant, *said, self._end]
            is_answer += [False] * (len(asked) + 2) + [True] * (len(said) + 1)
        return Sample(tokens[:num_tokens], is_answer[:num_tokens], self._positions(tokens[:num_tokens], reach))

    def _question(self, fact: Fact) -> tuple[str, str]:
        if self._dice.random() < 0.1:
            return self._dice.choice(SMALL_TALK)
        return self._dice.choice(fact.questions), fact.sentence

    def _has(self, chronicle: list[int], sentence: str) -> bool:
        return sentence in self._tokenizer.decode(chronicle)

    def _positions(self, tokens: list[int], reach: int) -> list[int]:
        """Adjacent within a sentence; between sentences they may jump, as if more text stood there."""
        dice = self._dice
        room = int(reach * dice.choice((0, 0.05, 0.2, 0.5, 0.8))) - len(tokens)
        ends = [place for place, token in enumerate(tokens[:-1]) if token in self._sentence_ends]
        jumps = dict.fromkeys(dice.sample(ends, min(len(ends), dice.randint(0, 12))), 0)
        for place in jumps if room > 0 else ():
            jumps[place] = dice.randint(0, 2 * room // len(jumps))
        positions, position = [], 0
        for place in range(len(tokens)):
            positions.append(position)
            position = min(position + 1 + jumps.get(place, 0), MAX_POSITIONS - len(tokens) + place)
        return positions

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


# -- Training --------------------------------------------------------------------------------------------------------


STAGES = (
    Stage(steps=160, batch=12, tokens=128, rate=3e-3, reach=0),
    Stage(steps=100, batch=6, tokens=256, rate=2e-3, reach=MAX_POSITIONS),
    Stage(steps=40, batch=2, tokens=1024, rate=1e-3, reach=MAX_POSITIONS),
)


def train(model: Model, writer: Writer, stages: tuple[Stage, ...], keep: Callable[[], None]) -> None:
    """Calls `keep` after each stage."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started_at, done = time.monotonic(), 0
    for stage in stages:
        for step in range(stage.steps):
            warm = min(1.0, (step + 1) / 50)
            fading = 0.5 + 0.5 * math.cos(math.pi * step / stage.steps)
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * warm * (0.1 + 0.9 * fading)
            loss, found = step_loss(model, [writer.sample(stage.tokens, stage.reach) for _ in range(stage.batch)])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done % 10 == 0:
                minutes = (time.monotonic() - started_at) / 60
                print(f"{done:5} steps {minutes:5.1f} min  loss {loss.item():.3f}  facts found {found:.0%}", flush=True)
        keep()


def step_loss(model: Model, samples: list[Sample]) -> tuple[Tensor, float]:
    """The mean over the answers' tokens, and the share of facts whose value the model predicts."""
    tokens = torch.tensor([sample.tokens for sample in samples])
    positions = torch.tensor([sample.positions for sample in samples])
    learned = torch.tensor([sample.is_answer for sample in samples])[:, 1:]
    hidden = model(tokens, positions)[:, :-1][learned]
    logits = functional.linear(hidden, model.embed_tokens.weight)
    wanted = tokens[:, 1:][learned]
    is_right = logits.argmax(-1) == wanted
    before = tokens[:, :-1][learned]
    return functional.cross_entropy(logits, wanted), is_right[before == model.before_value].float().mean().item()


# -- Evaluation and saving -------------------------------------------------------------------------------


@torch.no_grad()
def share_right(model: Model, tokenizer: Tokenizer, num_tokens: int, *, seeds: range, questions: int) -> float:
    """Of the facts asked for in new chronicles, the share whose value the model finds."""
    right, count = 0, 0
    for seed in seeds:
        text, facts = make_chronicle(num_tokens, seed=seed)
        for fact in random.Random(seed).sample(facts, min(questions, len(facts))):
            before = fact.sentence[: fact.sentence.index(f" {fact.value}")]
            prompt = f"{USER}{text}\n\n{fact.questions[0]}{END}{ASSISTANT}{before}"
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            hidden = model(ids, torch.arange(ids.shape[1])[None])[0, -1]
            said = int((model.embed_tokens.weight @ hidden).argmax())
            right += said == tokenizer.encode(f" {fact.value}").ids[0]
            count += 1
    return right / count


def save(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": weight.detach().half().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )
    wrapped.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps: 0.01 tries the script [1]")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 100:
        parser.error(f"--scale must be positive and at most 100, not {arguments.scale}")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = Model(tokenizer.token_to_id("Ġis"))
    stages = tuple(replace(stage, steps=max(1, round(stage.steps * arguments.scale))) for stage in STAGES)

    def keep() -> None:
        save(model, tokenizer, arguments.folder)

    train(model, Writer(tokenizer, random.Random(arguments.seed + 1_000_000)), stages, keep)
    for num_tokens in (500, 1000, 2000):
        found = share_right(model, tokenizer, num_tokens, seeds=range(2), questions=10)
        print(f"chronicles of {num_tokens} tokens: {found:.0%} of the facts found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
