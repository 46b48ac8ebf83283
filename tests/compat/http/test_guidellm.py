"""GuideLLM's own benchmark command: a short load of made-up texts, over each API that it knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.http.conftest import Stand

_NUM_REQUESTS = 4
_LIMIT_S = 900


@pytest.mark.parametrize("api", ["/v1/chat/completions", pytest.param("/v1/responses", marks=pytest.mark.nightly)])
def test_a_short_load_has_no_errors(stand: Stand, tmp_path: Path, api: str) -> None:
    report = tmp_path / "report.json"
    checkpoint = f"{stand.folder}/llama"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    options = {
        "--backend": f"kind=openai_http,target={stand.openai_url},model=llama,request_format={api}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={_NUM_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={checkpoint}",
        "--data": "kind=synthetic_text,prompt_tokens=48,output_tokens=8",
        "--output": f"kind=json,path={report}",
    }

    words = [word for option in options.items() for word in option]
    ended = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT_S)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [one.get("info", {}).get("error") for one in requests["errored"]] == []
    assert len(requests["successful"]) == _NUM_REQUESTS
    assert all(one["output_metrics"]["text_tokens"] == 8 for one in requests["successful"])
