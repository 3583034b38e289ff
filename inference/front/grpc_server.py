"""A gRPC server with this project's limits."""

import grpc

from inference.front.access import Access
from inference.front.guard import IDLE_S
from inference.front.http_server import max_connections
from inference.system.ports import host_and_port

# Applies before the token is read. gRPC 1.67 by default refuses at random between 8 and 16 KiB.
MAX_METADATA_BYTES = 8 << 10
SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # fail if another process has the port
    ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for the first bytes of a connection
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # gRPC 1.67 by default decompresses a whole message, however large, before it checks its size.
    ("grpc.per_message_decompression", 0),
]

# A request has up to 8 MiB outside of tensors, and percent-encoding turns a byte into three.
_MAX_METADATA_BYTES = 64 << 20
# Reconnect soon to a server that does not listen yet: gRPC's default backoff begins at a second and
# grows.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # An error quotes names from the request.
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    *((f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "max")),
]


def grpc_server(
    access: Access, handler: grpc.GenericRpcHandler, *, host: str, port: int
) -> grpc.aio.Server:
    """Return a gRPC server that is bound to its port but not started yet. Raises OSError."""
    address = host_and_port(host, port)
    limits = [
        ("grpc.max_receive_message_length", access.max_request_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections()),
    ]
    server = grpc.aio.server(options=[*limits, *SERVER_OPTIONS])
    server.add_generic_rpc_handlers((handler,))
    try:
        if access.tls_cert is None or access.tls_key is None:
            server.add_insecure_port(address)
        else:
            pair = (access.tls_key.read_bytes(), access.tls_cert.read_bytes())
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise OSError(f"{address}: Address already in use, or not of this machine") from error
    return server
