"""A deployment of tiny checkpoints for programs that nobody here wrote: `python -m tests.compat.http.stand FOLDER`.

Runs with the project's Python, while the programs have an environment of their own. Once everything is ready, one line
of JSON on the standard output says where; all of it ends when the standard input is closed. The weights are random:
what a model says means nothing, and only what is asked for by a grammar is certain. The weights of `caller` are made by
hand: of itself it calls a tool, and answers once it has the result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.testing.tiny_models import make_tiny_model, make_tiny_tokenizer
from tests.compat.http.weather import ANSWER, CALLED, TOOL
from tests.support.deployments import DeploymentProcess

_NUM_LOOKED_AT = 256
_TEMPLATES = Path(__file__).with_name("templates")
_MAX_MODEL_LEN = 32768
_LIKELIER = 3.0
"""By this the logits of some tokens are larger: answers, thoughts and strings end after tens of tokens."""
_ENDS = ("</think>", '"')
_CALLER = "caller"
_ENDED = "<|im_end|>"
_CALL = (
    "<tool_call>",
    f'\n{{"name": "{TOOL}", "arguments": ',
    *('{"place": "', f'{CALLED["place"]}", "days": ', f"{CALLED['days']}}}}}"),
    "\n</tool_call>",
)
"""Cut where a schema leaves a choice: what it forces has tokens of its own."""

_SEQUENCES = (("<|question|>", *_CALL, _ENDED), ("<|result|>", ANSWER, _ENDED))
"""Each token of these is followed by the next: they differ, so that the last one alone tells what comes."""

_CERTAIN = 60.0
"""The logit of what follows, whatever the temperature."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """`special` tokens are left out of decoded text, `added` ones are not, as in the tokenizers of these families."""

    family: str
    end: str
    begin: str | None
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


_CHECKPOINTS = {
    "qwen": _Checkpoint(
        "qwen3", "<|im_end|>", None, ("<|im_start|>",), ("<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
    "llama": _Checkpoint(
        "llama", "<|eot_id|>", "<|begin_of_text|>", ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    ),
    "mistral": _Checkpoint(
        "mistral",
        "</s>",
        "<s>",
        (
            *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    _CALLER: _Checkpoint("qwen3", _ENDED, None, ("<|im_start|>", "<|question|>", "<|result|>"), (*_CALL, ANSWER)),
}
_MODELS = "".join(f"  - model: {name}\n    kv_cache_space: 64MiB\n" for name in _CHECKPOINTS)
_DEPLOYMENT = f"models:\n{_MODELS}cache:\n  memory: 64MiB\n"


def save_checkpoint(folder: Path, name: str) -> None:
    """Write what a hub download would be, with the family's kind of chat template."""
    checkpoint = _CHECKPOINTS[name]
    tokenizer = make_tiny_tokenizer()
    names = {"eos_token": checkpoint.end} | ({"bos_token": checkpoint.begin} if checkpoint.begin else {})
    tokenizer.add_special_tokens({**names, "additional_special_tokens": list(checkpoint.special)})
    tokenizer.add_tokens(list(checkpoint.added))
    tokenizer.chat_template = (_TEMPLATES / f"{name}.jinja").read_text()
    tokenizer.model_max_length = _MAX_MODEL_LEN
    model = make_tiny_model(
        checkpoint.family,
        max_position_embeddings=_MAX_MODEL_LEN,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    vocabulary = tokenizer.get_vocab()
    if name == _CALLER:
        _make_certain(model, [[vocabulary[token] for token in sequence] for sequence in _SEQUENCES])
    else:
        _make_likelier(model, [vocabulary[end] for end in (checkpoint.end, *_ENDS) if end in vocabulary])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_likelier(model: PreTrainedModel, token_ids: list[int]) -> None:
    """One number of the hidden state becomes the same everywhere, and speaks for these tokens alone."""
    inner: Any = model.model
    with torch.no_grad():
        inner.embed_tokens.weight[:, 0] = 2.0
        for layer in inner.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        same = inner(torch.arange(_NUM_LOOKED_AT).unsqueeze(0)).last_hidden_state[..., 0].mean()
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[token_ids, 0] = _LIKELIER / same


def _make_certain(model: PreTrainedModel, sequences: list[list[int]]) -> None:
    """Layers add nothing: the last token alone says what comes next."""
    inner: Any = model.model
    with torch.no_grad():
        for layer in inner.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for sequence in sequences:
            states = inner(torch.tensor([sequence])).last_hidden_state[0]
            for state, follower in zip(states, sequence[1:], strict=False):
                model.lm_head.weight[follower] += _CERTAIN * state / state.square().sum()


def main() -> None:
    folder = Path(sys.argv[1])
    for name in _CHECKPOINTS:
        save_checkpoint(folder / name, name)
    with DeploymentProcess(folder, _DEPLOYMENT) as deployment:
        urls = {"openai_url": deployment.openai_url, "ollama_url": deployment.ollama_url}
        print(json.dumps({**urls, "folder": str(folder)}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
