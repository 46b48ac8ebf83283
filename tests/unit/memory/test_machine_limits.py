"""What this machine, or the control group that we are in, has for us."""

from __future__ import annotations

from pathlib import Path

from kvtier.memory.machine_limits import available_memory_bytes, machine_memory_bytes, num_cores

MIB = 1 << 20


def test_what_is_available_is_what_the_machine_says(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 999 kB\nMemAvailable:    1024 kB\nBuffers: 1 kB\n")

    assert available_memory_bytes(info, tmp_path) == MIB


def test_a_control_group_with_less_counts_and_gives_up_pages_of_files(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text(f"MemAvailable: {64 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{32 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{20 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {4 * MIB}\n")

    assert available_memory_bytes(info, tmp_path) == 16 * MIB


def test_without_either_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path) == machine_memory_bytes()


def test_cores_are_those_of_the_share_and_at_least_one(tmp_path: Path) -> None:
    of_mask = num_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")

    assert of_mask >= 1
    assert num_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path) == of_mask
