"""A check that ranks can reach each other, made before gloo connects them.

gloo would wait for five times its timeout, and then report neither both hosts nor the cause.
"""

import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_INTERFACE = struct.Struct("16s4x4s8x")  # struct ifreq: name and IPv4 address


def listening_address(default: str) -> str:
    """Return the address at which this rank listens: `default`, or that of GLOO_SOCKET_IFNAME.

    Raises:
        RuntimeError: The interface has no IPv4 address.
    """
    name = os.environ.get(_INTERFACE_VARIABLE, "").partition(",")[0]
    if not name:
        return default
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = _INTERFACE.pack(name.encode(), b"")
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
    except (OSError, struct.error) as error:
        raise RuntimeError(
            f"{_INTERFACE_VARIABLE}={name} has no IPv4 address on {socket.gethostname()} "
            f"({error}); without the variable, ranks listen at {default}"
        ) from error
    return socket.inet_ntoa(_INTERFACE.unpack(answer)[1])


def check_reachable(
    store: Store, address: str, group_rank: int, size: int, *, timeout_s: float
) -> None:
    """Check that each of `size` ranks can connect to a free port of every other rank.

    All ranks must call this, with `group_rank` and `address` and a store that nothing else uses.

    Raises:
        RuntimeError: With host, address and port of each failed connection.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The kernel completes connections up to the backlog, without an accept.
    with socket.create_server((address, 0), family=family, backlog=size) as listener:
        own = [socket.gethostname(), *listener.getsockname()[:2]]
        store.set(f"at/{group_rank}", json.dumps(own))
        others = [rank for rank in range(size) if rank != group_rank]
        with ThreadPoolExecutor(len(others)) as pool:
            places = [json.loads(store.get(f"at/{rank}")) for rank in others]
            problems = pool.map(lambda there: _problem(there, timeout_s), places)
            store.set(f"tried/{group_rank}", json.dumps(list(problems)))
        tried = [f"tried/{rank}" for rank in range(size)]
        store.wait(tried, timedelta(seconds=2 * timeout_s))
        found = [each for name in tried for each in json.loads(store.get(name)) if each]
    if found:
        raise RuntimeError(
            f"{'; '.join(found)}. Ranks of several nodes need every TCP port between them; "
            f"{_INTERFACE_VARIABLE} names the interface of another network"
        )


def _problem(there: Sequence[str | int], timeout_s: float) -> str | None:
    host, address, port = there
    try:
        with socket.create_connection((str(address), int(port)), timeout=timeout_s):
            return None
    except OSError as error:
        own = socket.gethostname()
        return f"{own} cannot reach {host} at {address}, port {port}: {error.strerror or error}"
