"""Conversion of a checkpoint to an FT folder or another output, and the checks before it starts."""

import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.checkpoints import LATEST, chosen_entry
from export_scripts.checkpoints.base import Remarks, fingerprint_files, json_file
from export_scripts.checkpoints.containers import is_gzip
from export_scripts.checkpoints.dcp import INDEX_NAME
from export_scripts.checkpoints.huggingface import is_huggingface
from export_scripts.checkpoints.megatron import is_megatron
from export_scripts.checkpoints.sharded_huggingface import CONFIG_NAME, settings_folder
from export_scripts.conversion.fp8 import in_fp8
from export_scripts.conversion.huggingface import inherited_settings, plan_huggingface
from export_scripts.conversion.lora import peft_problems
from export_scripts.conversion.peft import plan_peft
from export_scripts.conversion.plan import ConversionPlan, plan_conversion
from export_scripts.conversion.request import (
    PEFT,
    PEFT_CONFIG,
    TORCH_DIST,
    ConversionRequest,
    request_problems,
)
from export_scripts.conversion.tokenizer import with_tokenizer
from export_scripts.conversion.torch_dist import plan_torch_dist
from export_scripts.families.mapping.source_mapping import ENTRY
from export_scripts.ft.validation import manifest_problems, read_manifest, validate_directory
from export_scripts.ft.writer import FTWriter, WorkPaths, is_interrupted, recover
from foundations import __version__
from foundations.errors import CheckpointMismatchError, listed, refuse, without_middle
from foundations.files.disk import check_space
from foundations.files.journal import Journal
from foundations.files.json_content import Fields
from foundations.files.lock import folder_lock
from foundations.files.tree import files_below

__all__ = ["ConversionRequest", "ConversionSummary", "check_conversion", "convert"]

Progress = Callable[[int, int], None]

# A gzip archive must be unpacked to be read; the check before the start skips larger ones.
_QUICK_GZIP_BYTES = 32 << 20

_NO_LOCKS = (
    "the output's file system has no locks: do not start a second conversion to the same folder"
)


@dataclass(frozen=True)
class ConversionSummary:
    """Summary of a conversion."""

    ft_dir: Path  # the output folder
    family: str  # the model family's name
    tensors: int  # number of tensors
    files: int  # number of files, config.ini and tokenizer included
    size_bytes: int  # size of all files
    written_bytes: int  # weights that this run wrote; an interrupted run wrote the others
    seconds: float  # duration of this run
    peak_memory_bytes: int  # largest resident size of this process so far
    already_done: bool  # whether the folder was complete before
    remarks: Remarks = ()  # warnings and choices to report


def check_conversion(request: ConversionRequest) -> list[str]:
    """Return every problem of a request; no tensor is read and numpy is not imported."""
    problems = request_problems(request)
    if problems:
        return problems
    try:
        if not _is_slow_to_open(request):
            _plan(request)
    except ValueError as error:
        path = str(request.checkpoint_path)
        return [
            f"{request.names['checkpoint_path']}={problem}" if problem.startswith(path) else problem
            for problem in str(error).split("\n")
        ]
    paths = WorkPaths(request.folder)
    return _folder_problems(request, paths, _identity(request))


def _is_slow_to_open(request: ConversionRequest) -> bool:
    """Return whether a large archive would have to be unpacked."""
    entry, _ = chosen_entry(request.checkpoint_path, request.checkpoint_name)
    archives = (entry, *(path for _, path in request.sources))
    return any(
        path.is_file() and path.stat().st_size > _QUICK_GZIP_BYTES and is_gzip(path)
        for path in archives
    )


def _folder_problems(request: ConversionRequest, paths: WorkPaths, identity: str) -> list[str]:
    """Return a problem if the output folder holds another conversion."""
    if not paths.final.exists() or request.overwrite:
        return []
    if _is_finished(paths, identity) or is_interrupted(paths, Journal(paths.journal, identity)):
        return []
    return [
        f"{request.names['output_dir']}: {paths.final} exists and holds another conversion; choose "
        f"another folder, or replace it with {request.names['overwrite']}"
    ]


def convert(request: ConversionRequest, *, progress: Progress | None = None) -> ConversionSummary:
    """Write the output folder, such as <output_dir>/<tp_size>-gpu, unless it is already complete.

    An interrupted run of the same request is resumed. The folder appears by one rename after every
    file is on disk. `progress` is called with (bytes done, bytes in total), one call at a time,
    from any thread.

    Raises:
        CheckpointMismatchError: The source cannot be converted; every reason is listed.
        ValueError: The request is wrong, the folder holds something else, or the disk is too small.
        OSError: A file cannot be written.
    """
    started = time.monotonic()
    refuse(request_problems(request))
    paths = WorkPaths(request.folder)
    with folder_lock(paths.lock, f"another conversion is writing {paths.final}") as is_held:
        recover(paths)
        shutil.rmtree(paths.scratch, ignore_errors=True)  # left by a killed run
        identity = _identity(request)
        if _is_finished(paths, identity):
            return _summary(paths, started, written_bytes=None)
        refuse(_folder_problems(request, paths, identity))
        try:
            paths.scratch.mkdir()
            plan = _plan(request, paths.scratch)
            if not is_held:
                plan = replace(plan, remarks=(*plan.remarks, _NO_LOCKS))
            written_bytes = _run(plan, paths, identity, progress)
        finally:
            shutil.rmtree(paths.scratch, ignore_errors=True)
        return _summary(paths, started, written_bytes=written_bytes)


def _plan(request: ConversionRequest, scratch_dir: Path | None = None) -> ConversionPlan:
    plan = plan_conversion(request, scratch_dir=scratch_dir)
    if request.has_shards:
        return plan
    if request.output_format == TORCH_DIST:
        return plan_torch_dist(plan)
    if request.output_format == PEFT:
        return plan_peft(plan)
    folder = plan_huggingface(plan)
    return with_tokenizer(in_fp8(plan, folder) if request.fp8 else folder)


# Fields of the request that, with the sources, determine the contents of the folder.
_IDENTITY_FIELDS = (
    "tp_size", "max_shard_bytes", "weight_data_type", "checkpoint_name", "megatron_model",
    "model_type", "fp8", "keep_fp8", "vocabulary", "ia3_in_place", "given", "allow",
    "allow_setting",
)  # fmt: skip


def _identity(request: ConversionRequest) -> str:
    """Return a digest of everything that determines the folder's contents."""
    choices = {name: getattr(request, name) for name in _IDENTITY_FIELDS}
    if request.has_shards:
        del choices["max_shard_bytes"]
    if request.checkpoint_name == LATEST:
        choices["checkpoint_name"] = None
    facts = {
        "version": __version__,
        "sources": [
            (name, _source_fingerprint(path, settings=request.model_config))
            for name, path in request.sources
        ],
        **{
            name: sorted(value) if isinstance(value, tuple) else value
            for name, value in choices.items()
        },
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source_fingerprint(path: Path, *, settings: Path | None = None) -> str:
    if not path.is_dir():
        return fingerprint_files([path])
    # Other hidden files belong to version control or an editor.
    names = (file.relative_to(path) for file in files_below(path))
    visible = [
        n for n in names if not any(part.startswith(".") and part != INDEX_NAME for part in n.parts)
    ]
    if settings is None and (folder := settings_folder(path)):
        visible.append(folder / CONFIG_NAME)
    return fingerprint_files([path / name for name in visible])


def _is_finished(paths: WorkPaths, identity: str) -> bool:
    if is_interrupted(paths, Journal(paths.journal, identity)) or not paths.final.is_dir():
        return False
    try:
        is_ours = read_manifest(paths.final).get("identity") == identity
    except CheckpointMismatchError:
        return False
    return is_ours and not folder_problems(paths.final, checksums=False)


def _run(plan: ConversionPlan, paths: WorkPaths, identity: str, progress: Progress | None) -> int:
    """Execute a plan; return the bytes of weights written."""
    from export_scripts.conversion.write import Counter, write_files

    sizes = {file.name: file.size_bytes for files in plan.files for file in files}
    with FTWriter(paths, identity) as writer:
        done = sum(sizes[name] for name in writer.records.keys() & sizes)
        counter = Counter(progress, sum(sizes.values()), done)
        problem = check_space(paths.final.parent, counter.total - done)
        if problem:
            if not writer.records:
                writer.discard()
            raise ValueError(problem)
        for name, data in plan.extra_files.items():
            if name not in writer.records:
                writer.write(name, len(data), [memoryview(data)])
        if problems := write_files(plan, writer, counter):
            writer.discard()
            raise CheckpointMismatchError(listed(problems))
        writer.finish(_manifest(plan, writer, identity))
    problems = folder_problems(paths.final, checksums=False)
    assert not problems, problems
    assert counter.done == counter.total, (counter.done, counter.total)
    return counter.done - done


def _manifest(plan: ConversionPlan, writer: FTWriter, identity: str) -> Fields:
    reader, request = plan.facts.reader, plan.request
    files = {
        name: {key: record[key] for key in ("size_bytes", "crc32", "tensor") if key in record}
        for name, record in sorted(writer.records.items())
    }
    return {
        "manifest_version": 1,
        "identity": identity,
        "tool": f"slipway {__version__}",
        "command": sys.argv,
        "source": {
            "path": str(request.checkpoint_path.absolute()),
            "format": reader.format,
            "origin": reader.origin or plan.mapping.name,
            "files": [str(path.absolute()) for path in reader.files],
            "fingerprint": _source_fingerprint(
                request.checkpoint_path, settings=request.model_config
            ),
            # A Hugging Face folder that is made from the shards gets these settings again.
            **({"settings": inherited_settings(plan)} if request.has_shards else {}),
        },
        "lora": [
            {"path": str(path.absolute()), "fingerprint": _source_fingerprint(path)}
            for path in request.lora_checkpoints
        ],
        "family": plan.mapping.family.name,
        "tensor_para_size": request.tp_size,
        "weight_data_type": request.weight_data_type,
        "format": request.output_format,
        **({} if request.fp8 is None else {"fp8": request.fp8}),
        "allow_setting": list(request.allow_setting),
        "remarks": [without_middle(remark) for remark in plan.remarks],
        "files": files,
        "tensors": {
            tensor.key: {
                **({} if tensor.pieces[0][1] else {"split": tensor.items[0].tensor.split}),
                "shape": list(tensor.shape),
                "dtype": first.type_of(tensor),
                "source": [
                    *dict.fromkeys(
                        key.partition(ENTRY)[0] for item in tensor.items for key, _ in item.reads
                    )
                ],
            }
            for first, *_ in plan.files
            for tensor in first.tensors
        },
    }


def _summary(paths: WorkPaths, started: float, *, written_bytes: int | None) -> ConversionSummary:
    """Return the summary of a finished folder; `written_bytes` is None if it already existed."""
    manifest = read_manifest(paths.final)
    return ConversionSummary(
        ft_dir=paths.final,
        family=manifest["family"],
        tensors=len(manifest["tensors"]),
        files=len(manifest["files"]),
        size_bytes=sum(record["size_bytes"] for record in manifest["files"].values()),
        written_bytes=written_bytes or 0,
        seconds=time.monotonic() - started,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        already_done=written_bytes is None,
        remarks=tuple(manifest["remarks"]),
    )


def folder_problems(folder: Path, *, checksums: bool = True) -> list[str]:
    """Return every difference between a converted folder and its description.

    An FT folder is checked by `validate_directory`; any other folder by its manifest, a model also
    by its configuration (names, shapes and sizes), an adapter also for settings that would not be
    read.
    """
    settings = folder / PEFT_CONFIG
    is_known = folder.is_dir() and (is_huggingface(folder) or is_megatron(folder))
    if not settings.is_file() and not is_known:
        return validate_directory(folder, checksums=checksums)
    problems = list(manifest_problems(folder, checksums=checksums).values())
    if settings.is_file():
        return problems or peft_problems(json_file(settings), settings)
    request = ConversionRequest(
        folder, folder.parent, 1, "fp32", output_format="huggingface", allow_setting=("*",)
    )
    try:
        plan_conversion(request)
    except ValueError as error:
        problems += str(error).split("\n")
    return problems
