"""The plan of a torch_dist checkpoint, from which Megatron-LM continues training.

The tensors are those of a Megatron-LM checkpoint, by the inverse of its mapping, in files that
megatron-core's dist_checkpointing reads: a torch.save archive for each layer of each tensor, and
torch's index. Layout: pytorch, torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from export_scripts.checkpoints.base import CheckpointReader, StoredTensor, json_table
from export_scripts.checkpoints.dcp import INDEX_NAME
from export_scripts.checkpoints.distributed import BACKEND, COMMON_KEY, COMMON_NAME, METADATA_NAME
from export_scripts.checkpoints.megatron import LATEST_NAME, RELEASE
from export_scripts.checkpoints.megatron_layers import as_gpt_model
from export_scripts.conversion.huggingface import (
    Candidates,
    choose_candidate,
    grouped,
    written_mappings,
)
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.request import HYBRID
from export_scripts.conversion.tensor_plan import WrittenFile, WrittenTensor
from export_scripts.conversion.torch_archive import (
    Archive,
    Global,
    PickledObject,
    StoredValues,
    pickled,
)
from export_scripts.families.layout.generation import GENERATION_FILE
from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape, item_size, strides
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table, json_bytes, without_nulls

ARGUMENTS_NAME = "megatron_arguments.txt"
_STORAGES = {"fp32": "FloatStorage", "fp16": "HalfStorage", "bf16": "BFloat16Storage"}
_METADATA = "torch.distributed.checkpoint.metadata."
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\bmlp\.experts\.local_experts\.(\d+)\.")
# Modules for which Transformer Engine saves an extra state, empty without FP8.
_STATEFUL = re.compile(r"^(?!embedding\.)(.+(?<!\.router))\.(?:layer_norm_)?weight$")
# HybridModel's head has an extra state, tied or not.
_HEAD_STATE = "output_layer._extra_state/shard_0_1"
_QKV, _ATTENTION = ".linear_qkv", ".core_attention"

# Arguments of a run, not of its model, that Megatron-LM reads from a checkpoint.
_RUN: Table = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_random_init": False,
    "tokenizer_type": "HuggingFaceTokenizer",
}
# Arguments whose switch turns them off -> the switch; and those without a switch if they are on.
_SWITCHED_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
}
_NO_SWITCH = ("bias_gelu_fusion", "add_bias_linear", "use_rotary_position_embeddings")
_PER_LAYER = ("no_rope_freq", "window_attn_skip_freq")
_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


class _Place(NamedTuple):
    """The place of a tensor in a stacked one: name, and index and size of each stacked axis."""

    name: str
    numbers: Shape
    counts: Shape

    def state(self, module: str) -> str:
        """Return the key of the extra state of a module that has the tensor."""
        axes = (self.numbers, self.counts) if self.numbers else ((0,), (1,))
        return f"{module}._extra_state/shard_{'_'.join('.'.join(map(str, axis)) for axis in axes)}"

    def box(self, shape: Shape) -> tuple[Shape, Shape]:
        """Return the offset and the shape of a tensor in the stacked one."""
        return (*self.numbers, *(0 for _ in shape)), (*(1 for _ in self.numbers), *shape)


def plan_torch_dist(source: ConversionPlan) -> ConversionPlan:
    """Return the plan of a torch_dist checkpoint from the plan of its source.

    Raises:
        CheckpointMismatchError: No arguments of Megatron-LM express the model; every reason is
            listed.
    """
    try:
        mapping, args, tensors = choose_candidate(source, "Megatron-LM", _candidates)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(source.facts.with_paths(error.problems)) from error
    request, config = source.request, vars(source.config)
    kind = source.config.weight_data_type
    own = {tensor.key.removeprefix(mapping.prefix): tensor for tensor in tensors}
    is_hybrid = request.megatron_model == HYBRID
    names = {key: _hybrid_name(key) if is_hybrid else key for key in own}
    if is_hybrid:
        args = _hybrid_arguments(source, args, own, names)
    # Layers are stacked if all are alike. megatron/core/transformer/transformer_block.py
    is_stacked = not is_hybrid and "moe_layer_freq" not in args
    places = {
        tensor.key: _place(names[key], args, is_stacked=is_stacked) for key, tensor in own.items()
    }
    args = {**args, **_RUN, "bf16": kind == "bf16", "fp16": kind == "fp16"}
    common = {
        "args": PickledObject("argparse.Namespace", state=args),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    # An empty extra state, and the common state, which newer releases of megatron-core read here
    # and not in a file.
    objects = [b"".join(Archive([content]).parts()) for content in (None, common)]
    header = b"".join(objects)
    files = []
    entries = {}
    for number, group in enumerate(grouped(tensors, kind, request.max_shard_bytes)):
        file, at, written = f"__0_{number}.distcp", len(header), []
        for tensor in group:
            place = places[tensor.key]
            begin, shape = place.box(tensor.shape)
            size = math.prod(shape) * item_size(kind)
            archive = Archive(_tensor(shape, kind), size, at)
            length = size + sum(map(len, archive.parts()))
            entries[place.name, begin] = file, at, length
            written.append(dataclasses.replace(tensor, archive=archive))
            at += length
        files.append(WrittenFile(f"{RELEASE}/{file}", tuple(written), kind, at, header))
    shapes = {places[tensor.key]: tensor.shape for tensor in tensors}
    tokens = {"bos_token_id": config["start_id"], "eos_token_id": config["end_id"]}
    stated = json_table(source.extra_files.get(GENERATION_FILE, b"{}"), GENERATION_FILE)
    stated = without_nulls(stated)
    checkpoint = {
        **source.extra_files,
        GENERATION_FILE: json_bytes({**tokens, **stated}),
        INDEX_NAME: pickled(_index(shapes, kind, entries, objects)),
        COMMON_NAME: b"".join(Archive(common).parts()),
        METADATA_NAME: json_bytes({"sharded_backend": BACKEND, "sharded_backend_version": 1}),
    }
    return dataclasses.replace(
        source,
        files=tuple((file,) for file in files),
        extra_files={
            **{f"{RELEASE}/{name}": data for name, data in checkpoint.items()},
            LATEST_NAME: RELEASE.encode(),
            ARGUMENTS_NAME: "".join(f"{switch}\n" for switch in _switches(args)).encode(),
        },
    )


def _candidates(source: ConversionPlan, is_tied: bool) -> Candidates:
    mappings = written_mappings(source, "megatron")
    if not mappings:
        refuse(
            [
                f"Megatron-LM has no model that computes what a {source.mapping.family.name} "
                "does; known are Llama-style decoders, their mixtures of experts, and GPT with "
                "learned positions"
            ]
        )
    return [
        (mapping, dict(args), False)
        for mapping in mappings
        if mapping.written
        for args in mapping.written(source.config, is_tied)
    ]


def _hybrid_arguments(
    source: ConversionPlan, args: Table, tensors: Mapping[str, WrittenTensor], names: Table
) -> Fields:
    """Return the arguments of HybridModel, whose layers are halves of GPTModel's.

    Raises:
        CheckpointMismatchError: HybridModel does not support a setting of the model.
    """
    path, count = source.facts.reader.path, args["num_layers"]
    if args.get("qk_layernorm"):
        raise CheckpointMismatchError(
            f"{path}: {_SPEC[1]} of HybridModel has no norms of queries and keys; write it for "
            f"GPTModel ({source.request.names['megatron_model']}=gpt)"
        )
    experts = args.get("moe_layer_freq") or [int("num_experts" in args)] * count
    hybrid = {
        **args,
        **{key: [flag for flag in args[key] for _ in "*-"] for key in _PER_LAYER if args.get(key)},
        "num_layers": 2 * count,
        "hybrid_layer_pattern": "".join("*" + "-E"[flag] for flag in experts),
        "moe_layer_freq": None,
        "is_hybrid_model": True,
        "spec": _SPEC,
    }
    pieces = {names[key]: (StoredTensor(path, 0, "fp32", t.shape),) for key, t in tensors.items()}
    back = as_gpt_model(CheckpointReader("megatron", path, hybrid, pieces, ()))
    differing = [key for key, value in args.items() if back.config[key] != value]
    assert not differing, differing
    assert back.tensors.keys() == tensors.keys()
    return hybrid


def _hybrid_name(key: str) -> str:
    """Return HybridModel's name for a tensor of GPTModel."""
    if match := _LAYER.match(key):
        is_attention = match[2].startswith(("self_attention.", "input_layernorm."))
        return f"decoder.layers.{2 * int(match[1]) + (not is_attention)}.{match[2]}"
    return key.replace("decoder.final_layernorm.", "decoder.final_norm.")


def _place(name: str, args: Table, *, is_stacked: bool) -> _Place:
    axes = []
    match = _LAYER.match(name)
    if is_stacked and match:
        name = f"decoder.layers.{match[2]}"
        axes.append((int(match[1]), args["num_layers"]))
    if match := _EXPERT.search(name):
        name = _EXPERT.sub("mlp.experts.experts.", name)
        axes.append((int(match[1]), args["num_experts"]))
    return _Place(name, *(tuple(pair[n] for pair in axes) for n in (0, 1)))


def _tensor(shape: Shape, kind: str) -> PickledObject:
    """Return a tensor whose values are its archive's storage."""
    storage = StoredValues(f"torch.{_STORAGES[kind]}", math.prod(shape))
    rest = (0, shape, strides(shape), False, PickledObject("collections.OrderedDict"))
    return PickledObject("torch._utils._rebuild_tensor_v2", (storage, *rest))


def _index(
    shapes: Mapping[_Place, Shape],
    kind: str,
    entries: Mapping[tuple[str, Shape], tuple[str, int, int]],
    objects: Sequence[bytes],
) -> PickledObject:
    """Return torch's index of the tensors, and of the objects at the beginning of the first file.

    These are the extra state, which all modules share, and the common state.
    """

    def size(values: Shape) -> PickledObject:
        return PickledObject("torch.Size", (values,))

    def entry(
        name: str, offset: Shape | None, place: tuple[str, int, int]
    ) -> tuple[PickledObject, PickledObject]:
        begin = None if offset is None else size(offset)
        key = {"fqn": name, "offset": begin, "index": None}
        value = dict(zip(("relative_path", "offset", "length"), place, strict=True))
        where = "torch.distributed.checkpoint.filesystem._StorageInfo"
        return PickledObject(f"{_METADATA}MetadataIndex", state=key), PickledObject(
            where, state=value
        )

    properties = (
        Global(f"torch.{SOURCE_TYPES[kind][1]}"),
        PickledObject("torch.serialization._get_layout", ("torch.strided",)),
        False,
        PickledObject(f"{_METADATA}_MEM_FORMAT_ENCODING", (0,)),
        False,
    )
    table: dict[str, Fields] = {}
    states = dict.fromkeys([_HEAD_STATE])
    for place, shape in shapes.items():
        described = table.setdefault(
            place.name,
            {
                "properties": PickledObject(f"{_METADATA}TensorProperties", state=properties),
                "size": size((*place.counts, *shape)),
                "chunks": [],
            },
        )
        chunk = dict(zip(("offsets", "sizes"), map(size, place.box(shape)), strict=True))
        described["chunks"].append(PickledObject(f"{_METADATA}ChunkStorageMetadata", state=chunk))
        if match := _STATEFUL.match(place.name):
            states[place.state(match[1])] = None
            if match[1].endswith(_QKV):
                states[place.state(match[1].removesuffix(_QKV) + _ATTENTION)] = None
    state, common = map(len, objects)
    places = dict.fromkeys(states, ("__0_0.distcp", 0, state))
    places[COMMON_KEY] = ("__0_0.distcp", state, common)
    metadata = {
        "state_dict_metadata": {
            **{
                name: PickledObject(f"{_METADATA}TensorStorageMetadata", state=described)
                for name, described in table.items()
            },
            **dict.fromkeys(places, PickledObject(f"{_METADATA}BytesStorageMetadata", state={})),
        },
        "planner_data": None,
        "storage_data": dict(
            [
                *(entry(name, offset, place) for (name, offset), place in entries.items()),
                *(entry(name, None, place) for name, place in places.items()),
            ]
        ),
    }
    return PickledObject(f"{_METADATA}Metadata", state=metadata)


def _switches(args: Table) -> list[str]:
    """Return the model's arguments as command-line switches of Megatron-LM."""
    found = []
    for name, value in args.items():
        switch = f"--{name.replace('_', '-')}"
        if name in _SWITCHED_OFF:
            found += [] if value else [_SWITCHED_OFF[name]]
        elif value is True and name not in _NO_SWITCH:
            found.append(switch)
        elif not isinstance(value, bool) and value is not None and name not in _RUN:
            values = value if name == "spec" else [value]
            found.append(" ".join((switch, *(re.sub(r"[() ]", "", str(part)) for part in values))))
    return found
