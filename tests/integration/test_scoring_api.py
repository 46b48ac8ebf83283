"""Requests of evaluation harnesses and editors over HTTP, to an engine with a model: scored prompts, infills."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from kvtier import LLM
from kvtier.api.config import ApiConfig, ApiKey, EngineAddress, ServedModelConfig
from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.engine.client import EngineClient
from kvtier.engine.process.hello import hello_of
from kvtier.engine.process.server import EngineServer
from kvtier.testing.tiny_models import make_tiny_tokenizer, save_tiny_model
from tests.support.fake_engine import http_client, running
from tests.support.openai_asking import CHAT, COMPLETIONS, documents_of, error_of

torch.set_num_threads(1)

MODEL = "tiny"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ATOL = 1e-4
TEXT = "the hen in the inn"
MAX_MODEL_LEN = 512
KEY = "a key of sixteen or more characters"


@dataclass(frozen=True, slots=True)
class Serving:
    client: httpx.Client
    reference: PreTrainedModel

    def post(self, path: str, **fields: object) -> Any:
        response = self.client.post(path, json={"model": MODEL, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, **fields: object) -> str:
        response = self.client.post(path, json={"model": MODEL, **fields})
        assert response.status_code == 400, response.text
        sentence: str = error_of(response)["message"]
        return sentence

    def logprobs_of(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.reference(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scoring")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model = save_tiny_model(folder, "qwen3")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(list(FIM), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture
def serving(folder: Path, reference: PreTrainedModel, tmp_path: Path) -> Iterator[Serving]:
    with served(tmp_path, folder) as client:
        yield Serving(client, reference)


class served:
    """An engine behind its socket and the HTTP server over it, in threads of this process."""

    def __init__(self, folder: Path, model: Path, keys: tuple[ApiKey, ...] = ()) -> None:
        self._llm = LLM(str(model), device="cpu", dtype="float32", kv_cache_space=1 << 20, max_num_batched_tokens=32)
        engine = self._llm.engine
        self._client = EngineClient(engine)
        hello = hello_of(engine, name="engine-0", model=MODEL, started_at=0.0)
        path = str(folder / "engine.sock")
        self._server = EngineServer(self._client, engine.prompts, hello, path)
        served_model = ServedModelConfig(names=(MODEL,), engines=(EngineAddress("engine-0", path),), default_options={})
        self._running = running("openai", ApiConfig(models=(served_model,), keys=keys, max_body_bytes=1 << 20))

    def __enter__(self) -> httpx.Client:
        self._http = http_client(self._running.__enter__())
        return self._http

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._running.__exit__(None, None, None)
        self._server.close()
        self._client.close()


# --- lm-eval's loglikelihood ------------------------------------------------------------------------------------------


def harness_body(prompts: Sequence[Sequence[int]], **fields: object) -> dict[str, object]:
    """The request of lm-eval's local-completions to score prompts of token ids."""
    return {"prompt": list(map(list, prompts)), "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234} | {
        "echo": True,
        **fields,
    }


def harness_reading(document: Any, context_lengths: Sequence[int], num_answered: int) -> list[tuple[float, bool]]:
    """Reads the answer like lm-eval: the tokens behind the context, without generated ones."""
    found = []
    choices = sorted(document["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        end = len(choice["logprobs"]["token_logprobs"]) - num_answered
        logprobs = choice["logprobs"]["token_logprobs"][length:end]
        top = choice["logprobs"]["top_logprobs"][length:end]
        is_greedy = all(own == max(one.values()) for own, one in zip(logprobs, top, strict=True))
        found.append((sum(logprobs), is_greedy))
    return found


@pytest.mark.parametrize("num_answered", [0, 1])
def test_loglikelihoods_are_those_of_transformers(serving: Serving, num_answered: int) -> None:
    prompts = [list(range(60, 130)), [5, 6, 7, 8, 9], list(range(60, 100)), [200, 201]]
    with torch.no_grad():
        greedy = serving.reference.generate(torch.tensor([[30, 31, 32]]), max_new_tokens=4, do_sample=False)[0].tolist()
    prompts.append(greedy)
    lengths = [60, 2, 39, 1, 3]

    document = serving.post(COMPLETIONS, **harness_body(prompts, max_tokens=num_answered))

    found = harness_reading(document, lengths, num_answered)
    for prompt, length, (logprob, is_greedy) in zip(prompts, lengths, found, strict=True):
        expected = serving.logprobs_of(prompt)
        rows = range(length - 1, len(prompt) - 1)
        own = sum(float(expected[row, prompt[row + 1]]) for row in rows)
        assert logprob == pytest.approx(own, abs=ATOL * len(rows))
        assert is_greedy == all(int(expected[row].argmax()) == prompt[row + 1] for row in rows)
    assert [is_greedy for _, is_greedy in found][-1]
    assert document["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert document["usage"]["completion_tokens"] == num_answered * len(prompts)


def test_an_echo_has_the_prompt_and_the_answer_in_text_tokens_and_offsets(serving: Serving) -> None:
    tokens = serving.post("/tokenize", prompt=TEXT)["tokens"]
    plain = serving.post(COMPLETIONS, prompt=TEXT, max_tokens=5, temperature=0, logprobs=2)["choices"][0]

    for prompt in (TEXT, tokens):
        choice = serving.post(COMPLETIONS, prompt=prompt, max_tokens=5, temperature=0, logprobs=2, echo=True)
        [found] = choice["choices"]
        logprobs = found["logprobs"]
        assert found["text"] == TEXT + plain["text"]
        assert "".join(logprobs["tokens"][: len(tokens)]) == TEXT
        assert logprobs["tokens"][len(tokens) :] == plain["logprobs"]["tokens"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert len(logprobs["top_logprobs"][1]) in (2, 3)
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][len(tokens)] == len(TEXT)
        assert logprobs["token_logprobs"][len(tokens) :] == pytest.approx(plain["logprobs"]["token_logprobs"])


def test_an_echo_without_logprobs_is_text_alone(serving: Serving) -> None:
    document = serving.post(COMPLETIONS, prompt=[TEXT, "an"], max_tokens=0, echo=True, n=2)

    assert [choice["text"] for choice in document["choices"]] == [TEXT, TEXT, "an", "an"]
    assert all(choice["logprobs"] is None and choice["finish_reason"] == "length" for choice in document["choices"])
    assert "prompt_logprobs" not in document["choices"][0]


def test_every_answer_and_every_stream_echoes_the_same(serving: Serving) -> None:
    fields = {"prompt": TEXT, "max_tokens": 3, "seed": 1, "n": 3, "logprobs": 1, "echo": True, "ignore_eos": True}
    whole = serving.post(COMPLETIONS, **fields)["choices"]

    response = serving.client.post(COMPLETIONS, json={"model": MODEL, "stream": True, **fields})

    chunks = [document["choices"][0] for document in documents_of(response.text)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [one for chunk in own if chunk["logprobs"] for one in chunk["logprobs"][name]]
            assert streamed == choice["logprobs"][name]
    assert len({tuple(choice["logprobs"]["token_logprobs"][:5]) for choice in whole}) == 1


def test_a_large_body_is_echoed_too(serving: Serving) -> None:
    body = json.dumps({"model": MODEL, **harness_body([list(range(20)), [3, 2, 1]], max_tokens=0)}).encode()

    response = serving.client.post(COMPLETIONS, content=body + b" " * INLINE_BODY_BYTES)

    assert [len(choice["logprobs"]["tokens"]) for choice in response.json()["choices"]] == [20, 3]


# --- vLLM's prompt_logprobs -------------------------------------------------------------------------------------------


def check_prompt_logprobs(serving: Serving, tokens: Sequence[int], found: Any) -> None:
    assert len(found) == len(tokens)
    assert found[0] is None
    expected = serving.logprobs_of(tokens)
    for position, one in enumerate(found[1:], 1):
        row = expected[position - 1]
        assert set(one) == {str(token_id) for token_id in (tokens[position], *row.topk(2).indices.tolist())}
        for token_id, entry in one.items():
            assert entry["logprob"] == pytest.approx(float(row[int(token_id)]), abs=ATOL)
            assert entry["rank"] == int((row > row[int(token_id)]).sum()) + 1
            assert isinstance(entry["decoded_token"], str)


def test_prompt_logprobs_of_completions_are_in_each_choice(serving: Serving) -> None:
    prompts = [list(range(100)), [9, 8, 7]]

    document = serving.post(COMPLETIONS, prompt=prompts, max_tokens=1, n=2, prompt_logprobs=2, temperature=1)

    for number, prompt in enumerate(prompts):
        for choice in document["choices"][2 * number : 2 * number + 2]:
            check_prompt_logprobs(serving, prompt, choice["prompt_logprobs"])


def test_prompt_logprobs_of_a_chat_are_beside_its_choices(serving: Serving) -> None:
    messages = [{"role": "user", "content": "in the inn"}]
    tokens = serving.post("/tokenize", messages=messages)["tokens"]

    document = serving.post(CHAT, messages=messages, max_tokens=2, prompt_logprobs=2)

    check_prompt_logprobs(serving, tokens, document["prompt_logprobs"])
    assert "prompt_logprobs" not in document["choices"][0]


# --- bias -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bias_forces_a_token(serving: Serving, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}

    document = serving.post(path, **asked, max_tokens=4, logit_bias={str(ord("x") - ord("!")): 0, "87": 100})

    choice = document["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert len(text) == 4
    assert len(set(text)) == 1


def test_a_bias_of_no_token_is_refused(serving: Serving) -> None:
    sentence = serving.refusal(COMPLETIONS, prompt="hi", logit_bias={"99999": 1})

    assert sentence == "logit_bias must only name tokens of the vocabulary of 320, not 99999"


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_text_has_its_tokens_and_tokens_their_text(serving: Serving) -> None:
    expected = make_tiny_tokenizer().encode(TEXT)

    found = serving.post("/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    back = serving.post("/detokenize", tokens=found["tokens"])

    assert found["tokens"] == expected
    assert found["token_strs"] == make_tiny_tokenizer().convert_ids_to_tokens(expected)
    assert (found["count"], found["max_model_len"]) == (len(expected), MAX_MODEL_LEN)
    assert back == {"prompt": TEXT}


def test_messages_are_tokenized_as_the_template_writes_them(serving: Serving) -> None:
    messages = [{"role": "user", "content": "hi"}]

    with_answer = serving.post("/tokenize", messages=messages)
    without = serving.post("/tokenize", messages=messages, add_generation_prompt=False)

    rendered = serving.post("/detokenize", tokens=with_answer["tokens"])["prompt"]
    assert rendered == "<|role|>user\nhi<|end|><|role|>assistant\n"
    assert rendered.startswith(serving.post("/detokenize", tokens=without["tokens"])["prompt"])
    assert without["count"] < with_answer["count"]
    assert with_answer["token_strs"] is None


def test_the_only_model_need_not_be_named(serving: Serving) -> None:
    response = serving.client.post("/tokenize", json={"prompt": "hi"})

    assert response.json()["count"] == 2


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("/tokenize", {}, "prompt is missing"),
    ("/tokenize", {"prompt": 5}, "prompt must be text, not 5"),
    ("/tokenize", {"prompt": ["a"]}, 'prompt must be text, not ["a"]'),
    ("/tokenize", {"prompt": "a", "messages": [{}]}, "prompt and messages cannot be combined"),
    ("/tokenize", {"messages": []}, "messages must be a list of at least one message, not []"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs must be true or false, not 1"),
    ("/tokenize", {"prompt": "a", "what": 1}, "what is not supported here"),
    ("/tokenize", {"prompt": "a" * (MAX_MODEL_LEN * 1024 + 1)}, "the prompt has 524289 characters"),
    ("/detokenize", {}, "tokens is missing"),
    ("/detokenize", {"tokens": "a"}, 'tokens must be a list, not "a"'),
    ("/detokenize", {"tokens": [1, "a"]}, 'tokens must be a list of token ids, not [1,"a"]'),
    ("/detokenize", {"tokens": [-1]}, "tokens must be a list of token ids, not [-1]"),
    ("/detokenize", {"tokens": [99999]}, "the token id 99999 is not in the vocabulary of 320"),
    ("/detokenize", {"tokens": [True]}, "tokens must be a list of token ids, not [true]"),
]


def test_a_body_about_tokens_that_cannot_be_served_gets_one_sentence(serving: Serving) -> None:
    for path, fields, sentence in WRONG:
        assert serving.refusal(path, **fields).startswith(sentence)


def test_an_unknown_model_has_no_tokens(serving: Serving) -> None:
    response = serving.client.post("/tokenize", json={"model": "another", "prompt": "hi"})

    assert response.status_code == 404


# --- infills ----------------------------------------------------------------------------------------------------------


def test_a_suffix_is_asked_for_with_the_models_fill_in_tokens(serving: Serving) -> None:
    prefix, suffix, middle = FIM
    raw = f"{prefix}def f(x):{suffix}return y{middle}"
    expected = serving.post(COMPLETIONS, prompt=raw, max_tokens=6, temperature=0)

    document = serving.post(COMPLETIONS, prompt="def f(x):", suffix="return y", max_tokens=6, temperature=0)

    assert document["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert document["choices"][0]["text"] == expected["choices"][0]["text"]


def test_a_model_without_fill_in_tokens_says_so_and_keys_are_needed_for_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / MODEL, "llama")
    with served(tmp_path, tmp_path / MODEL, keys=(ApiKey(name="one", key=KEY),)) as client:
        without = client.post("/tokenize", json={"prompt": "hi"})
        client.headers["Authorization"] = f"Bearer {KEY}"
        allowed = client.post("/tokenize", json={"prompt": "hi"})
        refused = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "suffix": "b"})

    assert (without.status_code, allowed.status_code, refused.status_code) == (401, 200, 400)
    assert error_of(refused)["message"] == "suffix needs a model with fill-in tokens, and this one has none"
