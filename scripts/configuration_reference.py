"""Writes docs/configuration.md from the Structs of `kvtier.deploy`: `python scripts/configuration_reference.py`."""

from __future__ import annotations

import ast
import inspect as source_of
import textwrap
from pathlib import Path

import msgspec
from msgspec import inspect

from kvtier.deploy.file import chat_form, native
from kvtier.deploy.file.form import type_in_words
from kvtier.deploy.file.size import SIZE_IN_WORDS, Size
from kvtier.sizes import format_size

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

NATIVE_EXAMPLE = """\
models:
  - model: Qwen/Qwen2.5-7B-Instruct     # a folder, or a name on the hub
    name: qwen                          # what clients call it
    engines: 2                          # processes with this model; they share hits
    devices: [cuda:0, cuda:1]           # one per engine
    gpu_memory_utilization: 0.9         # each engine's share of its device
    swap_space: 20GiB                   # host memory of each engine's own
    default_options: {max_tokens: 1024} # for requests that do not say

cache:                                  # one cache server, shared by all models
  memory: 20GiB
  disk: 100GiB
  folder: /var/cache/kvtier             # made when it is not there

http:
  host: 0.0.0.0
  openai: 8080
  ollama: 11434
  api_keys:
    - {name: alice, key_file: /run/secrets/alice, salt: tenant-a}
"""

SMALLEST_EXAMPLE = """\
models:
  - model: Qwen/Qwen2.5-0.5B-Instruct
"""

CHAT_EXAMPLE = """\
chat:
  models:
    -
      model: "THUDM/glm-4-9b-chat-1m-hf"
      engine_args:
        gpu_memory_utilization: 0.9
        quantization: "fp8"
        block_size: 16
        max_num_requests: 1
        max_num_batched_tokens: 1024
        max_model_len: 110000
        swap_space: 20                 # GiB
        enable_prefix_caching: True
        remote_kv_cache_server: True   # use the cache below
        trust_remote_code: True
        default_options:
          max_tokens: 1024

remote_kv_cache:
  -
    model: "THUDM/glm-4-9b-chat-1m-hf"    # the same as in chat
    engine_args:
      block_size: 16                   # the same as in chat
      memory_space: 20                 # GiB
      file_space: 100                  # GiB
      kv_cache_folder: "/share/test_kv_cache"

entrypoints: ["ollama_compatible", "openai_compatible"]
"""

INTRODUCTION = f"""\
<!-- Written by scripts/configuration_reference.py from the code: change that, not this. -->

# Deployment files

`kvtier serve deploy.yml` starts the deployment in a file; `kvtier check deploy.yml` reports its resources and any
problems, and starts nothing. A file can be as short as this: one model, no cache server, both APIs on
this host.

```yaml
{SMALLEST_EXAMPLE}```

With all common settings:

```yaml
{NATIVE_EXAMPLE}```

The other form has `chat`, `remote_kv_cache` and `entrypoints`, and each cache belongs to a model:

```yaml
{CHAT_EXAMPLE}```

- **Sizes** are text with a unit (`512MiB`, `20GiB`, `1.5TiB`) or a plain number, which is GiB.
- **Paths** are relative to the file's folder, and `~` is your home folder. A `model` is a folder relative to the
  file or to the working folder, or else a name on the hub.
- **YAML** anchors, aliases and merge keys (`<<`) work, so that models can share settings. A file has at most 1 MiB,
  10,000 values (20,000 with its aliases filled in) and 32 levels. A number such as `1:30`, which YAML reads in
  base 60, is refused: quote it.
- Unknown fields and values of the wrong kind are reported with their line before anything starts.
"""

SECTIONS: list[tuple[str, str, type[msgspec.Struct]]] = [
    ("The file", "", native.Deployment),
    ("`models`", "A list, one mapping per model.", native.ModelSection),
    ("`cache`", "One mapping, or a list of them with different names.", native.CacheSection),
    ("`cache.mooncake`", "docs/mooncake.md has more.", native.MooncakeSection),
    ("`cache.cluster`", "docs/cluster.md has more.", native.ClusterSection),
    ("`cache.objects`", "docs/objects.md has more.", native.ObjectsSection),
    ("`http`", "Port 0 chooses any free port.", native.HttpSection),
    ("`http.api_keys`", "A list, one mapping per key.", native.ApiKeySection),
    ("`warm`", "A list, one mapping per prefix; docs/prefixes.md has more.", native.WarmSection),
    ("`page`", "docs/page.md has more.", native.PageSection),
    ("The other form", "A file with one of these has this form.", chat_form.ChatDeployment),
    ("`chat.models`", "A list, one mapping per model.", chat_form.ChatModel),
    (
        "`chat.models[].engine_args`",
        "These, and every field of `models` above but `model` and `cache`.",
        chat_form.ChatEngineArgs,
    ),
    ("`remote_kv_cache`", "A list, one mapping per model that has a cache.", chat_form.ChatCache),
    (
        "`remote_kv_cache[].engine_args`",
        "These, and every field of `cache` above but `name`, `memory`, `disk`, `folder` and `disk_only`.",
        chat_form.ChatCacheArgs,
    ),
    ("`entrypoints[]`, where it is a mapping", "As in `- openai_compatible: {port: 8000}`.", chat_form.Entrypoint),
]


def page() -> str:
    parts = [INTRODUCTION]
    described: set[type] = set()
    for title, remark, kind in SECTIONS:
        # Fields shared with an earlier section are described there.
        kinds = [one for one in kind.__mro__ if one.__module__.startswith("kvtier") and one not in described]
        described.update(kinds)
        meanings = {name: text for one in kinds for name, text in _meanings(one).items()}
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        fields = {field.name: field for field in info.fields}
        rows = [_row(fields[name], meaning) for name, meaning in meanings.items()]
        head = [f"\n## {title}\n", f"{remark}\n"] if remark else [f"\n## {title}\n"]
        parts.append("\n".join([*head, "| field | takes | default | meaning |", "|---|---|---|---|", *rows, ""]))
    return "".join(parts)


def _meanings(kind: type) -> dict[str, str]:
    """The text below each field of a Struct's own, on one line, as a row of a table is."""
    (body,) = ast.parse(textwrap.dedent(source_of.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(after, ast.Expr), f"{kind.__name__}.{field.target.id} has no meaning below it"
            assert isinstance(after.value, ast.Constant)
            meanings[field.target.id] = " ".join(str(after.value.value).split())
    return meanings


def _row(field: inspect.Field, meaning: str) -> str:
    takes = type_in_words(field.type).replace(SIZE_IN_WORDS, "a size")
    return f"| `{field.name}` | {takes} | {_default(field)} | {meaning} |"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "needed"
    default = field.default
    match default:
        case None | () | "" | msgspec.NODEFAULT | msgspec.Struct():
            return ""
        case Size():
            return format_size(default) if default else "0"
        case bool():
            return f"`{str(default).lower()}`"
    return f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
