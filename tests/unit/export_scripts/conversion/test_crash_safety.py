"""A conversion killed at any moment continues to the same bytes; two runs never interleave."""

import errno
import fcntl
import json
import math
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from export_scripts.conversion import sharding
from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from export_scripts.ft.layout import ft_directory
from export_scripts.ft.validation import validate_directory
from export_scripts.ft.writer import FTWriter, WorkPaths
from foundations.errors import CheckpointMismatchError
from foundations.files.disk import full_disk
from foundations.files.lock import folder_lock
from tests.conversions import contents
from tests.json_files import read_json
from tests.tiny import TinyGPT, gpt_tensors, write_nemo

# Large enough that kills land everywhere, small enough for a test.
MODEL = TinyGPT(head_num=6, size_per_head=16, inter_size=330, num_layer=2, vocab_size=1026)
KILLS = 20  # times 100 in `make soak`


def request(source: Path, output_dir: Path, **fields: Any) -> ConversionRequest:
    values: dict[str, Any] = {"tp_size": 3, "weight_data_type": "fp16", "processes": 2} | fields
    return ConversionRequest(checkpoint_path=source, output_dir=output_dir, **values)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "x.nemo"
    return write_nemo(path, gpt_tensors(MODEL), MODEL, tp=2)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory) -> dict[str, bytes]:
    return contents(convert(request(source, tmp_path_factory.mktemp("expected"))).ft_dir)


def started(source: Path, output_dir: Path) -> int:
    """Return the id of a new process that converts; it shares what this one has imported."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            convert(request(source, output_dir))
            status = 0
        finally:
            os._exit(status)
    return child


def files_in(folder: Path) -> int:
    """Return how many files a folder holds; the last rename may take it away at any moment."""
    try:
        return sum(1 for _ in folder.iterdir())
    except FileNotFoundError:
        return 0


def killed_after(files: int, source: Path, output_dir: Path, pause_s: float) -> bool:
    """Run a conversion and kill it once some files exist; return whether it was cut off."""
    staging = WorkPaths(ft_directory(output_dir, 3)).staging
    child = started(source, output_dir)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if staging.is_dir() and files_in(staging) >= files:
            time.sleep(pause_s)
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1] != 0
        time.sleep(0.0002)
    return False


def test_scratch_of_a_run_killed_at_its_very_end_is_removed(source, tmp_path):
    convert(request(source, tmp_path))
    scratch = WorkPaths(ft_directory(tmp_path, 3)).scratch
    scratch.mkdir()
    convert(request(source, tmp_path))
    assert not scratch.exists()


@pytest.mark.soak
def test_runs_killed_at_random_moments_end_with_the_same_bytes(source, expected, tmp_path, soak):
    chance = random.Random(11)
    cut_off = 0
    for number in range(KILLS * soak):
        output = tmp_path / str(number)
        files = chance.randrange(len(expected) + 2)
        cut_off += killed_after(files, source, output, chance.random() * 0.003)
        if (output / "3-gpu").exists():
            assert validate_directory(output / "3-gpu") == []
        summary = convert(request(source, output))
        assert contents(summary.ft_dir) == expected
        assert sorted(path.name for path in output.iterdir()) == ["3-gpu", "3-gpu.manifest.json"]
        shutil.rmtree(output)
    assert cut_off, f"none of {KILLS * soak} kills came in time"


class StopConversionError(Exception):
    """Raised by a progress callback to interrupt a conversion."""


def interrupt(wanted: ConversionRequest, *, after: float) -> None:
    def progress(done: int, total: int) -> None:
        if done > after * total:
            raise StopConversionError

    with pytest.raises(StopConversionError):
        convert(wanted, progress=progress)


def test_only_unfinished_files_are_written_again(source, tmp_path):
    wanted = request(source, tmp_path)
    interrupt(wanted, after=0.6)
    summary = convert(wanted)
    weights = sum(path.stat().st_size for path in summary.ft_dir.glob("*.bin"))
    assert 0 < summary.written_bytes < 0.5 * weights


def test_values_that_are_not_finite_are_refused_after_an_interruption(tmp_path, monkeypatch):
    tensors = gpt_tensors(MODEL)
    word_embeddings = tensors["model.language_model.embedding.word_embeddings.weight"]
    word_embeddings[len(word_embeddings) // 2, 0] = math.nan  # neither in the first chunk nor last
    source = write_nemo(tmp_path / "nan.nemo", tensors, MODEL)
    monkeypatch.setattr(sharding, "_WORKSPACE", sharding.Workspace(1 << 12))
    monkeypatch.setattr(sharding, "LARGE_BYTES", 1 << 12)
    wanted = request(source, tmp_path, processes=1)
    interrupt(wanted, after=0.5)
    with pytest.raises(CheckpointMismatchError, match=r"model\.wte: the checkpoint holds 1 values"):
        convert(wanted)


def test_damage_of_the_source_is_found_again_after_an_interruption(tmp_path):
    source = write_nemo(tmp_path / "damaged.nemo", gpt_tensors(MODEL), MODEL)
    first = gpt_tensors(MODEL)["model.language_model.embedding.word_embeddings.weight"]
    content = bytearray(source.read_bytes())
    content[content.index(first.numpy().tobytes())] ^= 1
    source.write_bytes(content)
    wanted = request(source, tmp_path, processes=1)
    interrupt(wanted, after=0.5)
    with pytest.raises(
        CheckpointMismatchError, match=r"model\.wte: .* does not match its checksum"
    ):
        convert(wanted)


def a_weight(paths: WorkPaths) -> Path:
    return next(path for path in paths.staging.iterdir() if path.suffix == ".bin")


def cut_a_file(paths: WorkPaths) -> None:
    victim = a_weight(paths)
    victim.write_bytes(victim.read_bytes()[:-1])


def lose_a_file_in_a_reboot(paths: WorkPaths) -> None:
    first, *rest = paths.journal.read_text().splitlines()
    changed = [json.dumps(json.loads(line) | {"boot": "other"}) for line in rest]
    paths.journal.write_text("\n".join([first, *changed, ""]))
    victim = a_weight(paths)
    victim.write_bytes(bytes(victim.stat().st_size))


def cut_the_journal(paths: WorkPaths) -> None:
    paths.journal.write_bytes(paths.journal.read_bytes()[:-30])


def spoil_the_journal(paths: WorkPaths) -> None:
    with paths.journal.open("ab") as journal:
        journal.write(b"\xff\x00\xc3\n")


@pytest.mark.parametrize(
    "damage", [cut_a_file, lose_a_file_in_a_reboot, cut_the_journal, spoil_the_journal]
)
def test_what_was_damaged_while_interrupted_is_written_again(damage, source, expected, tmp_path):
    wanted = request(source, tmp_path)
    interrupt(wanted, after=0.6)
    damage(WorkPaths(ft_directory(tmp_path, 3)))
    assert contents(convert(wanted).ft_dir) == expected


def test_leftovers_of_another_request_are_not_mixed_in(source, tmp_path):
    interrupt(request(source, tmp_path), after=0.6)
    summary = convert(request(source, tmp_path, weight_data_type="fp32"))
    assert validate_directory(summary.ft_dir) == []
    weights = sum(path.stat().st_size for path in summary.ft_dir.glob("*.bin"))
    assert summary.written_bytes == weights


def test_the_same_request_again_finds_its_work_done(source, tmp_path):
    first = convert(request(source, tmp_path))
    folder = first.ft_dir
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = convert(request(source, tmp_path, processes=1))
    assert check_conversion(request(source, tmp_path)) == []
    assert (first.already_done, again.already_done) == (False, True)
    assert again.written_bytes == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_overwriting_exchanges_the_folder_whole(source, expected, tmp_path):
    other = write_nemo(tmp_path / "other.nemo", gpt_tensors(MODEL, seed=5), MODEL)
    output = tmp_path / "out"
    before = contents(convert(request(other, output)).ft_dir)
    interrupt(request(source, output, overwrite=True), after=0.5)
    assert contents(output / "3-gpu") == before
    assert contents(convert(request(source, output, overwrite=True)).ft_dir) == expected
    assert sorted(path.name for path in output.iterdir()) == ["3-gpu", "3-gpu.manifest.json"]


def test_a_kill_between_the_two_renames_of_an_exchange_is_repaired(source, expected, tmp_path):
    other = write_nemo(tmp_path / "other.nemo", gpt_tensors(MODEL, seed=5), MODEL)
    output = tmp_path / "out"
    convert(request(other, output))
    wanted = request(source, output, overwrite=True)
    interrupt(wanted, after=0.5)
    paths = WorkPaths(ft_directory(output, 3))
    paths.manifest.rename(paths.replaced_manifest)
    paths.final.rename(paths.replaced)
    assert contents(convert(wanted).ft_dir) == expected
    assert not paths.replaced.exists()


def test_a_kill_after_the_last_rename_is_recognised_as_finished(source, tmp_path):
    convert(request(source, tmp_path))
    paths = WorkPaths(ft_directory(tmp_path, 3))
    identity = read_json(paths.manifest)["identity"]
    paths.journal.write_text(json.dumps(identity) + "\n")
    assert convert(request(source, tmp_path)).already_done
    assert not paths.journal.exists()


def test_an_interrupted_exchange_does_not_open_the_folder_to_others(source, tmp_path):
    first = write_nemo(tmp_path / "first.nemo", gpt_tensors(MODEL, seed=5), MODEL)
    third = write_nemo(tmp_path / "third.nemo", gpt_tensors(MODEL, seed=6), MODEL)
    output = tmp_path / "out"
    convert(request(first, output))
    interrupt(request(source, output, overwrite=True), after=0.5)
    with pytest.raises(ValueError, match="holds another conversion"):
        convert(request(third, output))
    assert convert(request(first, output)).already_done


def test_a_second_run_to_the_same_folder_is_refused(source, tmp_path):
    paths = WorkPaths(ft_directory(tmp_path, 3))
    with (
        folder_lock(paths.lock, "another conversion"),
        pytest.raises(ValueError, match="another conversion"),
    ):
        convert(request(source, tmp_path))
    assert convert(request(source, tmp_path)).ft_dir.is_dir()


def test_a_lock_left_by_a_dead_process_does_not_hold(source, tmp_path):
    lock = WorkPaths(ft_directory(tmp_path, 3)).lock
    lock.write_text("999999\n")
    assert convert(request(source, tmp_path)).ft_dir.is_dir()


def test_a_run_of_another_size_is_not_held_up(source, tmp_path):
    paths = WorkPaths(ft_directory(tmp_path, 2))
    with folder_lock(paths.lock, "another conversion"):
        assert convert(request(source, tmp_path)).ft_dir.is_dir()


def test_too_small_a_disk_is_reported_before_writing(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"has 1,000 bytes free, the conversion needs \d+"):
        convert(request(source, tmp_path))


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_full_disk_is_reported_and_finished_files_are_kept(tmp_path, size, monkeypatch):
    paths = WorkPaths(ft_directory(tmp_path, 1))
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if bytes(data[:2]) == b"zz":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with FTWriter(paths, "x") as writer:
        writer.write("one.bin", 2, [memoryview(b"ab")])
        with pytest.raises(OSError, match=r"No space .*two\.bin") as caught:  # noqa: PT012
            writer.write("two.bin", size, [memoryview(b"z" * size)])
            writer.flush()  # large files are written behind
    assert "is full: " in str(full_disk(caught.value, tmp_path))
    with FTWriter(paths, "x") as writer:
        assert list(writer.records) == ["one.bin"]


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    def lost() -> Any:
        yield memoryview(b"ab")
        (tmp_path / "source.pt").open("rb")

    with (
        FTWriter(WorkPaths(ft_directory(tmp_path, 1)), "x") as writer,
        pytest.raises(FileNotFoundError, match=r"source\.pt"),
    ):
        writer.write("one.bin", 4, lost())


def test_an_exception_in_a_worker_ends_the_conversion(source, tmp_path):
    wanted = request(source, tmp_path)
    interrupt(wanted, after=0.2)
    assert not (tmp_path / "3-gpu").exists()
    lock = WorkPaths(ft_directory(tmp_path, 3)).lock
    assert not lock.exists()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_progress_counts_every_byte_once(source, tmp_path):
    seen = []
    summary = convert(request(source, tmp_path), progress=lambda *counts: seen.append(counts))
    weights = sum(path.stat().st_size for path in summary.ft_dir.glob("*.bin"))
    assert seen[-1] == (weights, weights)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_manifest_records_files_tensors_and_source(source, tmp_path):
    summary = convert(request(source, tmp_path))
    manifest = read_json(tmp_path / "3-gpu.manifest.json")
    assert set(manifest["files"]) == {path.name for path in summary.ft_dir.iterdir()}
    qkv = manifest["tensors"]["model.layers.1.attention.query_key_value.weight"]
    name = "model.language_model.encoder.layers.1.self_attention.query_key_value.weight"
    assert qkv == {"shape": [96, 3, 96], "split": 2, "dtype": "fp16", "source": [name]}
    assert manifest["source"]["path"] == str(source)


@pytest.mark.parametrize("of", ["lock", "journal", "staging", "manifest"])
def test_links_that_others_put_in_the_way_are_not_followed(of, source, expected, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    output = tmp_path / "out"
    output.mkdir()
    link = getattr(WorkPaths(ft_directory(output, 3)), of)
    link.symlink_to(precious if of == "staging" else precious / "file")
    if of == "lock":
        with pytest.raises(ValueError, match=r"3-gpu\.lock is a link, and a lock is a file"):
            convert(request(source, output))
    else:
        assert contents(convert(request(source, output)).ft_dir) == expected
    assert {path.name: path.read_text() for path in precious.iterdir()} == {"file": "kept"}


def test_links_in_what_an_interrupted_run_left_are_removed(source, expected, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    wanted = request(source, tmp_path / "out")
    interrupt(wanted, after=0.5)
    staging = WorkPaths(wanted.folder).staging
    (staging / "folder").symlink_to(precious)
    (staging / "config.ini.writing").symlink_to(precious / "file")
    assert contents(convert(wanted).ft_dir) == expected
    assert {path.name: path.read_text() for path in precious.iterdir()} == {"file": "kept"}


def test_a_limit_of_file_sizes_leaves_what_can_be_continued(source, expected, tmp_path):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            convert(request(source, tmp_path))
        except OSError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not WorkPaths(ft_directory(tmp_path, 3)).lock.exists()
    assert contents(convert(request(source, tmp_path)).ft_dir) == expected
