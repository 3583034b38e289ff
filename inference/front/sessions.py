"""Sessions belong to the client that opened them: each client has a namespace for its ids.

A model gets a keyed hash of the id and its owner. A client that guesses another's id therefore
names a session in its own namespace, which does not exist.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
from dataclasses import dataclass, field

_SOCK_DIAG = 4  # linux/netlink.h
_BY_FAMILY = 20  # linux/sock_diag.h
_UID_AT = 16 + 4 + 48 + 12  # bytes: nlmsghdr, then the offset of idiag_uid in inet_diag_msg
_DONE_OR_ERROR = (2, 3)
_ANY = 0xFFFFFFFF


@dataclass(frozen=True)
class Namespace:
    """The sessions of one client. `owner` names the client, `key` is the server's secret."""

    owner: str
    key: bytes = field(repr=False)

    def inside(self, session_id: int | str) -> int | str:
        """Return the id that a model gets, of the same type; 0 and "" mean no session."""
        if not session_id:
            return session_id
        named = f"{type(session_id).__name__} {session_id} {self.owner}".encode()
        digest = hmac.digest(self.key, named, hashlib.sha256)
        if isinstance(session_id, str):
            return digest.hex()
        # 63 bits: gRPC's integer parameters are signed.
        return int.from_bytes(digest[:8], "little") >> 1 or 1


class ClientSessions:
    """The namespaces of all clients."""

    def __init__(self, listens_at: str) -> None:
        self._key = secrets.token_bytes(32)
        self._listens_at = listens_at

    def namespace(
        self, token_owner: str | None, address: str, port: int, own_port: int
    ) -> Namespace:
        """Return the namespace of a client.

        It belongs to the token or, without tokens, to the client's address and, on this machine,
        to the user that owns the client's socket, according to the kernel.
        """
        if token_owner is not None:
            return Namespace(token_owner, self._key)
        uid = None
        with contextlib.suppress(ValueError, OSError):
            client = ipaddress.ip_address(address.partition("%")[0])
            client = getattr(client, "ipv4_mapped", None) or client
            own = ipaddress.ip_address(self._listens_at)
            if own.is_unspecified or own.version != client.version:
                own = client  # a client on this machine connects from the address it connects to
            uid = _socket_user((client.packed, port), (own.packed, own_port))
        return Namespace(address if uid is None else f"{address} user {uid}", self._key)


def _socket_user(own: tuple[bytes, int], other: tuple[bytes, int]) -> int | None:
    """Return the user of this machine's TCP socket between two endpoints, None without one.

    Asks the kernel for this socket alone (man 7 sock_diag, inet_diag_req_v2).
    """
    family = socket.AF_INET if len(own[0]) == 4 else socket.AF_INET6
    ends = struct.pack("!HH16s16s", own[1], other[1], own[0], other[0])
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ANY)
    request += ends + struct.pack("=III", 0, _ANY, _ANY)
    header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, 1, 1, 0)  # NLM_F_REQUEST
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG
    ) as link:
        link.settimeout(1.0)
        link.sendto(header + request, (0, 0))
        answer = link.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] in _DONE_OR_ERROR:
        return None
    return int(struct.unpack_from("=I", answer, _UID_AT)[0])
