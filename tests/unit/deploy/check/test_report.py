"""Whether a plan would start, and what it would use."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvtier import LLM
from kvtier.cli.main import main
from kvtier.deploy.check.machine import Filesystem, Gpu, Machine, this_machine
from kvtier.deploy.check.report import CheckReport, check_plan
from kvtier.deploy.plan.parts import DeploymentPlan
from kvtier.errors import ConfigError
from kvtier.stores.folder import take_folder
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import UnixListener

Deploy = Callable[[str], DeploymentPlan]
RUNTIME = Path("/run/kvtier")
GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(made, "qwen2")
    return made


def machine(**changes: Any) -> Machine:
    """One with two GPUs, 64 GiB of memory and a terabyte of disk."""
    settings: dict[str, Any] = {
        "memory_bytes": 64 * GIB,
        "gpus": (Gpu("large", 80 * GIB, True), Gpu("small", 8 * GIB, False)),
        "filesystem_of": lambda path: Filesystem(1, 1024 * GIB),
        "port_problem": lambda host, port: "",
        "hub_problem": lambda model, revision: "",
    }
    return Machine(**(settings | changes))


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])


def test_the_report_says_what_every_part_takes(deploy: Deploy, tiny: Path) -> None:
    plan = deploy(
        f"""
        models:
          - {{model: {tiny}, name: a, device: cpu, swap_space: 1GiB, kv_cache_space: 2GiB}}
          - {{model: {tiny}, name: b, device: cuda, gpu_memory_utilization: 0.5, cache: false}}
        cache: {{memory: 256MiB, disk: 3GiB, folder: kv, metrics: "127.0.0.1:9400"}}
        """
    )

    report = check_plan(plan, machine(), RUNTIME)

    assert report.problems == ()
    assert report.notes == ()
    (cache,) = report.caches
    assert (cache.memory_bytes, cache.disk_bytes, cache.disk_free_bytes) == (256 << 20, 3 * GIB, 1024 * GIB)
    assert cache.metrics == "127.0.0.1:9400"
    on_host, on_gpu = report.engines
    assert (on_host.device, on_gpu.device) == ("cpu", "cuda:0")
    assert on_host.architecture == "Qwen2ForCausalLM"
    assert on_host.kv_token_bytes == 2 * 2 * 2 * 16 * 4
    assert on_host.weights_bytes
    assert on_host.cache_server == "unix:/run/kvtier/cache.sock"
    assert report.host_bytes == (256 << 20) + 3 * GIB + on_host.weights_bytes
    assert report.disk_bytes == 3 * GIB


def test_an_engine_goes_to_a_gpu_if_there_is_one(deploy: Deploy, tiny: Path) -> None:
    plan = deploy(f"models: [{{model: {tiny}}}]")

    assert check_plan(plan, machine(), RUNTIME).engines[0].device == "cuda:0"
    (engine,) = check_plan(plan, machine(gpus=()), RUNTIME).engines
    assert (engine.device, engine.kv_cache_bytes) == ("cpu", GIB)


def test_engines_of_vllm_bring_what_they_need(deploy: Deploy) -> None:
    text = "models: [{model: owner/model, engine: vllm, device: 'cuda:0,1'}]"
    plan = deploy(text)

    report = check_plan(plan, machine(missing_extras=("engine",), gpus=()), RUNTIME)
    assert (report.problems, report.notes) == ((), ())
    (engine,) = report.engines
    assert (engine.device, engine.architecture, engine.weights_bytes) == ("cuda:0,1", "vLLM", None)
    (problem,) = check_plan(plan, machine(gpus=()), RUNTIME).problems
    assert problem == "owner-model: there is no device cuda:0,1: torch finds 0 GPUs"


def test_a_model_of_the_hub_is_noted(deploy: Deploy) -> None:
    report = check_plan(deploy("models: [{model: owner/no-such-model, cache_dir: hub}]"), machine(), RUNTIME)

    assert report.problems == ()
    assert report.notes == ("owner/no-such-model is not on this machine: it will be downloaded",)
    assert report.engines[0].weights_bytes is None


def test_what_the_hub_says_of_a_model_is_a_problem(deploy: Deploy) -> None:
    asked = []

    def problem(model: str, revision: str | None) -> str:
        asked.append((model, revision))
        return "there is no such model"

    plan = deploy("models: [{model: owner/none, devices: [cuda:0, cuda:1], cache_dir: hub, revision: v1}]")
    report = check_plan(plan, machine(hub_problem=problem), RUNTIME)

    assert report.problems == ("there is no such model",)
    assert report.notes == ()
    assert asked == [("owner/none", "v1")]


@pytest.fixture
def broken(here: Path, tiny: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(tiny, here / "broken")


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def _lose_shard(folder: Path) -> None:
    save_tiny_model(folder, "qwen2", max_shard_size=100_000)
    (folder / "model.safetensors").unlink()
    max(folder.glob("*.safetensors")).unlink()


def _spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')


def _leave_pointer(name: str) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        (folder / name).write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
        )

    return leave


def _leave_gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_cut_weights, r"broken/model\.safetensors cannot be read as safetensors: it should hold \d+ bytes"),
        (_lose_shard, r"index\.json names model-\d+-of-\d+\.safetensors, which is not in the folder"),
        (_spoil_tokenizer, r"the tokenizer in \S*broken cannot be loaded: "),
        (
            _leave_pointer("model.safetensors"),
            r"model\.safetensors is a pointer of Git LFS, not the file itself: run git",
        ),
        (_leave_pointer("tokenizer.json"), r"tokenizer\.json is a pointer of Git LFS, not the file itself: run git"),
        (_leave_pointer("config.json"), r"config\.json is a pointer of Git LFS, not the file itself: run git"),
        (_leave_gguf, r"broken is GGUF, which is not read here: give the folder, or the name on the hub, of the same"),
    ],
    ids=["cut", "shard", "tokenizer", "lfs weights", "lfs tokenizer", "lfs config", "gguf"],
)
def test_a_checkpoint_that_could_not_be_loaded_is_a_problem(
    deploy: Deploy, broken: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(broken)

    report = check_plan(deploy("models: [{model: broken, devices: [cpu, cpu]}]"), machine(), RUNTIME)

    (sentence,) = report.problems
    assert re.search(problem, sentence)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        LLM(str(broken), device="cpu", kv_cache_space=1 << 20)


def test_a_start_reads_the_tokenizer_before_the_weights(broken: Path) -> None:
    _spoil_tokenizer(broken)
    _cut_weights(broken)

    with pytest.raises(ConfigError, match="the tokenizer in"):
        LLM(str(broken), device="cpu", kv_cache_space=1 << 20)


def test_a_cache_folder_and_a_socket_in_use_are_problems(deploy: Deploy, here: Path, tiny: Path) -> None:
    plan = deploy(f"models: [{{model: {tiny}}}]\ncache: {{memory: 1MiB, disk: 64MiB, folder: kv, socket: kv.sock}}")
    lock = take_folder(here / "kv")
    listener = UnixListener(UnixAddress(str(here / "kv.sock")))
    try:
        in_use = check_plan(plan, machine(), RUNTIME)
    finally:
        os.close(lock)
        listener.close()

    assert in_use.problems == (
        f"the folder {here}/kv of cache is in use by another process",
        f"the socket {here}/kv.sock of cache is in use by another cache server",
    )
    assert check_plan(plan, machine(), RUNTIME).problems == ()


def test_a_folder_without_a_model_is_a_problem(deploy: Deploy, here: Path) -> None:
    (here / "empty").mkdir()

    report = check_plan(deploy("models: [{model: empty}]"), machine(), RUNTIME)

    assert report.problems == (f"{here}/empty has no config.json",)


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        (
            "[{model: TINY, swap_space: 64, cache: false}]\ncache: {memory: 1GiB}",
            {},
            "all parts together take 65GiB of memory, but this machine or its control group has 64GiB",
        ),
        (
            "[{model: TINY, device: cuda:2}]",
            {},
            "tiny: there is no device cuda:2: torch finds 2 GPUs",
        ),
        (
            "[{model: TINY, device: cuda:0}, {model: TINY, name: other, device: cuda}]",
            {},
            "tiny, other take 1.8 of cuda:0 together: lower gpu_memory_utilization to 0.50",
        ),
        (
            "[{model: TINY, device: cuda:1, quantization: fp8}]",
            {},
            "tiny: quantization fp8 needs a GPU of compute capability 8.9 or more, not small",
        ),
        (
            "[{model: TINY, gpu_memory_utilization: 0.5}]",
            {"gpus": (Gpu("toy", 1000, True),)},
            "tiny: weights of 402.25KiB do not fit into 0.5 of cuda:0, which is 500B",
        ),
        (
            "[{model: TINY, swap_space: 4KiB}]",
            {},
            "tiny: swap_space 4KiB holds no block of 8KiB",
        ),
        (
            "[{model: TINY, max_model_len: 1000000}]",
            {},
            "tiny: max_model_len 1000000 is more than the 512 that the model can do",
        ),
        (
            "[{model: TINY}]\ncache: {memory: 1MiB, disk: 1GiB, folder: TINY/../tiny/kv}",
            {},
            "the folder TINY/kv of cache is in that of the model TINY: give it one of its own",
        ),
        (
            "[{model: TINY, kv_cache_space: 8KiB}]",
            {},
            "tiny: kv_cache_space 8KiB holds fewer than two blocks of 8KiB",
        ),
        (
            "[{model: TINY}]\ncache: {memory: 1MiB, disk: 2TiB, folder: kv}",
            {},
            "HERE/kv may grow by 2TiB, but there is 1TiB of free disk",
        ),
        (
            "[{model: TINY, cache: a}]\ncache: [{name: a, disk: 600, folder: a}, {name: b, disk: 600, folder: b}]",
            {},
            "HERE/a, HERE/b may grow by 1.17TiB, but there is 1TiB of free disk",
        ),
        (
            "[{model: TINY}]",
            {"missing_extras": ("server",)},
            "a part of kvtier is not installed: pip install 'kvtier[server]'",
        ),
        (
            "[{model: TINY}]\ncache: {memory: 1MiB, disk: 1, folder: /proc/version/kv}",
            {},
            "the folder /proc/version/kv of cache cannot be used: /proc/version is not a folder",
        ),
        (
            "[{model: TINY}]\ncache: {memory: 1MiB, socket: /nowhere/at/all.sock}",
            {},
            "the folder of the socket /nowhere/at/all.sock of cache does not exist",
        ),
        (
            "[{model: TINY}]\ncache: {memory: 1MiB, socket: deploy.yml}",
            {},
            "the socket HERE/deploy.yml of cache cannot be made: a file of that name exists",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_sentence(
    deploy: Deploy, here: Path, tiny: Path, text: str, changes: dict[str, Any], problem: str
) -> None:
    report = check_plan(deploy("models: " + text.replace("TINY", str(tiny))), machine(**changes), RUNTIME)

    assert report.problems == (problem.replace("HERE", str(here)).replace("TINY", str(tiny)),)


def test_certificates_that_are_none_are_a_problem(deploy: Deploy, here: Path, tiny: Path) -> None:
    (here / "cert").write_text("not PEM")
    (here / "token").write_text("a long secret")
    plan = deploy(
        f"models: [{{model: {tiny}}}]\n"
        "cache: {memory: 1MiB, tcp: '127.0.0.1:0', token_file: token, tls_cert: cert, tls_key: cert}"
    )

    assert check_plan(plan, machine(), RUNTIME).problems == (
        f"tls_cert {here}/cert and tls_key {here}/cert of cache cannot be used: "
        "both must be PEM, the key without a password",
    )


def test_shares_of_one_device_may_add_up_to_all_of_it(deploy: Deploy, tiny: Path) -> None:
    plan = deploy(f"models: [{{model: {tiny}, engines: 10, device: cuda:0, gpu_memory_utilization: 0.1}}]")

    assert check_plan(plan, machine(), RUNTIME).problems == ()


def test_what_a_folder_holds_already_counts_as_its_own(deploy: Deploy, here: Path, tiny: Path) -> None:
    (here / "kv").mkdir()
    (here / "kv" / "payloads").write_bytes(b"x" * (1 << 20))
    plan = deploy(f"models: [{{model: {tiny}}}]\ncache: {{memory: 1MiB, disk: 2MiB, folder: kv}}")

    enough = machine(filesystem_of=lambda path: Filesystem(1, 1 << 20))
    short = machine(filesystem_of=lambda path: Filesystem(1, 1 << 19))

    assert check_plan(plan, enough, RUNTIME).problems == ()
    assert check_plan(plan, short, RUNTIME).problems == (
        f"{here}/kv may grow by 1MiB, but there is 512KiB of free disk",
    )


def test_a_folder_that_may_fail_is_only_noted(deploy: Deploy, tiny: Path) -> None:
    plan = deploy(
        f"models: [{{model: {tiny}}}]\ncache: {{memory: 1MiB, disk: 1, folder: /proc/version/kv, disk_optional: true}}"
    )

    report = check_plan(plan, machine(), RUNTIME)

    assert report.problems == ()
    assert report.notes == ("the folder /proc/version/kv of cache cannot be used: /proc/version is not a folder",)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_problem(deploy: Deploy, here: Path, tiny: Path) -> None:
    (here / "shut").mkdir(mode=0o500)
    plan = deploy(f"models: [{{model: {tiny}}}]\ncache: {{memory: 1MiB, disk: 1MiB, folder: shut/kv}}")

    assert check_plan(plan, machine(), RUNTIME).problems == (f"the folder {here}/shut/kv of cache cannot be written",)


class TestThisMachine:
    def test_it_has_memory_and_disk(self, tmp_path: Path) -> None:
        found = this_machine()

        assert found.memory_bytes > 1 << 28
        assert found.missing_extras == ()
        assert found.filesystem_of(tmp_path / "not" / "there").device == os.stat(tmp_path).st_dev

    def test_a_port_in_use_is_known_and_a_free_one_stays_free(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert this_machine().port_problem("127.0.0.1", port) == f"port {port} of 127.0.0.1 is in use"
        assert this_machine().port_problem("127.0.0.1", port) == ""
        assert this_machine().port_problem("127.0.0.1", 0) == ""

    def test_a_host_that_is_not_this_one_is_known(self) -> None:
        assert this_machine().port_problem("192.0.2.1", 8080).startswith("port 8080 of 192.0.2.1 cannot be used: ")


class TestCommand:
    def test_it_says_what_would_be_used_and_changes_nothing(self, here: Path, tiny: Path) -> None:
        Path("deploy.yml").write_text(
            f"models: [{{model: {tiny}, device: cpu, kv_cache_space: 16MiB}}]\n"
            "cache: {memory: 1MiB, disk: 1MiB, folder: kv/deep}\nhttp: {openai: 0, ollama: 0}\n"
        )
        before = tree(here), tree(tiny)

        result = CliRunner().invoke(main, ["check", "deploy.yml"])

        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert lines[0].split() == ["cache", "memory", "disk", "folder", "listens", "on"]
        assert lines[1].startswith("cache  1MiB    1MiB (")
        assert f"{here}/kv/deep" in lines[1]
        assert lines[4].startswith("tiny    cpu     Qwen2ForCausalLM  402.25KiB  512B          16MiB     -     /")
        assert "openai  http://127.0.0.1:0" in lines
        assert lines[-1] == "it would start"
        assert (tree(here), tree(tiny)) == before

    def test_problems_follow_the_table_and_make_the_status_1(self, here: Path, tiny: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            Path("deploy.yml").write_text(
                f"models: [{{model: {tiny}, device: cpu, swap_space: 4KiB}}]\nhttp: {{openai: {port}, ollama: 0}}\n"
            )
            result = CliRunner().invoke(main, ["check", "deploy.yml"])

        assert result.exit_code == 1
        assert result.output.splitlines()[-2:] == [
            "problem: tiny: swap_space 4KiB holds no block of 8KiB",
            f"problem: port {port} of 127.0.0.1 is in use",
        ]

    def test_machines_get_json(self, here: Path, tiny: Path) -> None:
        Path("deploy.yml").write_text(f"models: [{{model: {tiny}, device: cpu}}]\nhttp: {{openai: 0, ollama: 0}}\n")

        result = CliRunner().invoke(main, ["check", "--json", "deploy.yml"])

        report = msgspec.json.decode(result.output, type=CheckReport)
        assert result.exit_code == 0
        assert report.engines[0].served_as == "tiny"
        assert report.problems == ()

    def test_a_file_that_does_not_fit_is_told_with_its_lines(self, here: Path) -> None:
        Path("deploy.yml").write_text("models:\n  - modl: a/b\n")
        sentences = [
            "deploy.yml:2: models[0].modl is unknown; did you mean model? ",
            "deploy.yml:2: models[0] lacks model",
        ]

        result = CliRunner().invoke(main, ["check", "deploy.yml"])
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {sentences[0]}")
        assert result.output.endswith(f"{sentences[1]}\n")

        result = CliRunner().invoke(main, ["check", "--json", "deploy.yml"])
        assert result.exit_code == 1
        problems = msgspec.json.decode(result.output)["problems"]
        assert [problem[: len(start)] for problem, start in zip(problems, sentences, strict=True)] == sentences
