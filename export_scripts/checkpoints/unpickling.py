"""The object tree of a torch file, read without running any code that it names.

Tensors become `StoredTensor` records, containers plain ones, and objects of training frameworks
(argparse.Namespace, OmegaConf containers, enums, ...) inert records of their arguments and state.
A pickle that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from export_scripts.checkpoints.base import NO_CRC, Record, StoredTensor
from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Fields, is_count
from foundations.files.yaml_content import read_table

_GLOBALS = read_table(Path(__file__).with_name("pickle_globals.yaml"))
_INERT_NAMES = frozenset(_GLOBALS["names"]).union(
    f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _GLOBALS["builtins"]
)

_GETATTR = ("builtins.getattr", "__builtin__.getattr")

# Opcodes that no torch file has, and that would bypass the checks.
_REFUSED_OPCODES = (
    pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.BYTEARRAY8, pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER, pickle.OBJ,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class or dtype named by a pickle."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes that one or more tensors share."""

    dtype: str
    count: int  # number of values
    record: Record


# (key, type, number of values) of a storage -> its byte range.
StorageFinder = Callable[[str, str, int], Record]


class Inert:
    """The arguments and the state of an object, whose class is not run."""

    qualified_name: ClassVar[str] = "?"

    args: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        """Record the arguments."""
        self = super().__new__(cls)
        self.args, self.state, self.items, self.elements = args, None, {}, []
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Record an item."""
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Record an element."""
        self.elements.append(value)

    add = append

    def extend(self, values: Any) -> None:
        """Record elements."""
        self.elements.extend(values)

    def __repr__(self) -> str:
        return f"<{self.qualified_name}>"


def _check_key(key: Any) -> None:
    """Reject a key that could take forever to hash: nested tuples that share their parts."""
    for value in key if isinstance(key, tuple) else (key,):
        if isinstance(value, (tuple, frozenset)):
            raise pickle.UnpicklingError("a key nests tuples, which no checkpoint does")


# Opcodes that hash values of the stack -> which of the values since the last mark.
_HASHED = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


def _with_checked_keys(code: int, keys: slice) -> Callable[[Any], None]:
    load = pickle._Unpickler.dispatch[code]  # type: ignore[attr-defined, unused-ignore]

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            _check_key(key)
        load(unpickler)

    return checked


class _Ordered(OrderedDict[Any, Any]):
    """A dict that a pickle makes by calling its class."""

    def __setitem__(self, key: Any, value: Any) -> None:
        _check_key(key)
        super().__setitem__(key, value)


class RestrictedUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc, unused-ignore]
    """The pure Python unpickler with an allow-list.

    A pickle cannot make its memo allocate, as it can with the C unpickler's. `place` gives the byte
    range of a storage; None refuses tensors. Messages name `source`.
    """

    def __init__(
        self, data: io.BufferedIOBase, *, source: str, place: StorageFinder | None
    ) -> None:
        super().__init__(data, encoding="utf-8")
        self._source = source
        self._place = place
        self._storages: dict[str, Storage] = {}
        self._classes: dict[str, type[Inert]] = {}

    def _build(self) -> None:
        """Set the state of an inert record; a change of another object is refused."""
        stack = self.stack  # type: ignore[attr-defined, unused-ignore]
        state = stack.pop()
        target = stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, _Ordered):  # a state dict's _metadata is ignored
            raise CheckpointMismatchError(
                f"{self._source} is refused: its pickle changes a {type(target).__name__}"
            )

    dispatch: ClassVar[dict[int, Any]] = {
        code: function
        for code, function in pickle._Unpickler.dispatch.items()  # type: ignore[attr-defined, unused-ignore]
        if bytes([code]) not in _REFUSED_OPCODES
    } | {
        pickle.BUILD[0]: _build,
        **{code[0]: _with_checked_keys(code[0], keys) for code, keys in _HASHED.items()},
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the inert stand-in of a global; nothing is imported."""
        qualified = f"{module}.{name}"
        if qualified in _KNOWN:
            return _KNOWN[qualified]
        if qualified in _GETATTR:
            return self._nested
        if module.split(".")[0] not in _GLOBALS["packages"] and qualified not in _INERT_NAMES:
            raise CheckpointMismatchError(
                f"{self._source} is refused: its pickle names {qualified}, which no checkpoint "
                "needs and which is never run"
            )
        if qualified not in self._classes:
            self._classes[qualified] = type("Inert", (Inert,), {"qualified_name": qualified})
        return self._classes[qualified]

    def _nested(self, owner: Any, name: Any) -> type[Inert]:
        """Return the inert stand-in of a nested class, which protocol 2 names by getattr."""
        if not (isinstance(owner, type) and issubclass(owner, Inert)):
            raise CheckpointMismatchError(
                f"{self._source} is refused: its pickle names {_GETATTR[0]} of no class, "
                "which no checkpoint needs and which is never run"
            )
        return type("Inert", (Inert,), {"qualified_name": f"{owner.qualified_name}.{name}"})

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage of a persistent ID (storage, type, key, location, count)."""
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError(f"unknown persistent id {reprlib.repr(pid):.80}")
        _, kind, key, _location, count = pid[:5]
        _check_type(kind)
        if not isinstance(key, (str, int)) or not is_count(count):
            raise pickle.UnpicklingError(f"malformed storage {reprlib.repr(pid):.80}")
        if self._place is None:
            raise pickle.UnpicklingError("it holds tensors")
        if str(key) not in self._storages:
            record = self._place(str(key), kind.dtype, count)
            self._storages[str(key)] = Storage(kind.dtype, count, record)
        return self._storages[str(key)]


def _check_type(kind: Any) -> None:
    if not isinstance(kind, StorageType):
        name = getattr(kind, "qualified_name", reprlib.repr(kind))
        raise pickle.UnpicklingError(
            f"it holds a tensor of type {name}; convert the unquantised checkpoint"
        )


def _rebuild_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _grad: Any = None,
    _hooks: Any = None,
    views: Any = None,
    *,
    kind: Any = None,
) -> StoredTensor:
    """Return a tensor in a storage, of the storage's type unless `kind` states another.

    `views` has flags of lazily negated or conjugated values: torch/_utils.py, get_tensor_metadata.
    """
    if views:
        raise pickle.UnpicklingError(
            f"it holds a view that changes values ({reprlib.repr(views):.80}): save it again with "
            "tensor.resolve_neg().resolve_conj()"
        )
    sizes, steps = tuple(shape), tuple(stride)
    numbers = (offset, *sizes, *steps)
    if (
        not isinstance(storage, Storage)
        or len(sizes) != len(steps)
        or not all(map(is_count, numbers))
    ):
        raise pickle.UnpicklingError(f"a tensor's record is malformed: {reprlib.repr(numbers):.80}")
    if kind is not None:
        _check_type(kind)
    dtype = storage.dtype if kind is None else kind.dtype
    record = storage.record
    begin = offset * SOURCE_TYPES[dtype][0]
    tensor = StoredTensor(
        path=record.path,
        offset=record.offset + begin,
        dtype=dtype,
        shape=sizes,
        stride=None if _is_contiguous(sizes, steps) else steps,
        record=record if record.crc32 != NO_CRC else None,
    )
    if begin + tensor.span_bytes > storage.count * SOURCE_TYPES[storage.dtype][0]:
        raise pickle.UnpicklingError(f"a tensor of shape {list(sizes)} reaches beyond its storage")
    return tensor


def _rebuild_from_type(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """Return a plain tensor, or the size and the state of one that wraps others."""
    if not isinstance(rebuild, type):
        return rebuild(*args)
    if not (isinstance(kind, type) and issubclass(kind, Inert)):
        raise pickle.UnpicklingError(f"{reprlib.repr(kind):.80} in place of a tensor's class")
    tensor = kind()
    tensor.items = {"size": args[2], "state": state}
    return tensor


def _is_contiguous(shape: Shape, stride: Shape) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


# Stand-ins for the globals that a tensor needs.
_KNOWN: Fields = {
    "collections.OrderedDict": _Ordered,
    "typing.OrderedDict": _Ordered,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    # The type follows the hooks.
    "torch._utils._rebuild_tensor_v3": lambda *facts: _rebuild_tensor(
        *facts[:6], *facts[7:], kind=facts[6]
    ),
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    **{f"torch.{name}": StorageType(key) for key, (_, name, _) in SOURCE_TYPES.items()},
    **{
        f"{module}.{name}": StorageType(key)
        for module in ("torch", "torch.storage", "torch.cuda")
        for name, key in _GLOBALS["storages"].items()
    },
}


# Errors of the unpickler for bytes that are not a pickle of torch.save.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, IndexError, AttributeError, TypeError, ValueError,
    ArithmeticError, struct.error,
)  # fmt: skip


def unpickle(stream: io.BufferedIOBase, *, source: str, place: StorageFinder | None = None) -> Any:
    """Return the object tree of the pickle at the stream's position; without `place`, no tensors.

    Raises:
        CheckpointMismatchError: The pickle names a refused object, or is damaged.
    """
    try:
        return RestrictedUnpickler(stream, source=source, place=place).load()
    except CheckpointMismatchError:
        raise
    except (MemoryError, RecursionError) as error:
        raise CheckpointMismatchError(f"{source} is refused: its pickle is a bomb") from error
    except KeyError as error:
        raise CheckpointMismatchError(
            f"{source} is not a readable pickle: opcode {error} is not one that torch.save writes"
        ) from error
    except _DAMAGED as error:
        reason = str(error) or type(error).__name__
        raise CheckpointMismatchError(f"{source} is not a readable pickle: {reason}") from error
