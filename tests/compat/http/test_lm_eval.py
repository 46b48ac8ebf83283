"""lm-eval's likelihoods, over completions that echo their prompts, against those of transformers on the checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.compat.http.conftest import Stand

_MODEL = "llama"
_QUESTIONS = [
    {"question": "The sky over the sea is", "choices": [" blue", " made of bread", " on the shelf"], "answer": 0},
    {"question": "Snow falls in the", "choices": [" winter", " oven"], "answer": 0},
    {"question": "He opened the door with the", "choices": [" key.", " the the the the the the", " Öl"], "answer": 0},
]
_TASK = """\
task: tiny_questions
dataset_path: json
dataset_kwargs:
  data_files: {file}
  cache_dir: {cache}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
"""
_TRANSFORMERS = """\
import json, sys
import torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
found = []
for context, continuation in json.load(sys.stdin):
    head = tokenizer(context)["input_ids"]
    ids = tokenizer(context + continuation)["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    positions = range(len(head), len(ids))
    total = sum(logprobs[at - 1, ids[at]].item() for at in positions)
    found.append([total, all(logprobs[at - 1].argmax().item() == ids[at] for at in positions)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("sends_tokens", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_likelihoods_are_those_of_transformers(stand: Stand, tmp_path: Path, sends_tokens: bool) -> None:
    asked = [(one["question"], choice) for one in _QUESTIONS for choice in one["choices"]]
    expected = _of_transformers(stand, asked)

    found = _of_lm_eval(stand, tmp_path, sends_tokens)

    assert set(found) == set(asked)
    for pair, (logprob, is_greedy) in zip(asked, expected, strict=True):
        assert found[pair] == (pytest.approx(logprob, abs=2e-3), is_greedy), pair


def _of_lm_eval(stand: Stand, folder: Path, sends_tokens: bool) -> Mapping[tuple[str, str], tuple[float, bool]]:
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, _QUESTIONS)))
    (folder / "tiny_questions.yaml").write_text(_TASK.format(file=folder / "questions.jsonl", cache=folder))
    settings: dict[str, Any] = {
        "base_url": f"{stand.v1}/completions",
        "model": _MODEL,
        "tokenizer": f"{stand.folder}/{_MODEL}",
        "tokenizer_backend": "huggingface",
        "tokenized_requests": sends_tokens,
        "num_concurrent": 1,
        "max_retries": 1,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=settings,
        tasks=["tiny_questions"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return {
        tuple(arguments): (response[0][0], response[0][1])
        for sample in results["samples"]["tiny_questions"]
        for arguments, response in zip(sample["arguments"], sample["resps"], strict=True)
    }


def _of_transformers(stand: Stand, asked: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    command = [stand.python, "-c", _TRANSFORMERS, f"{stand.folder}/{_MODEL}"]
    ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return [(logprob, is_greedy) for logprob, is_greedy in json.loads(ended.stdout)]
