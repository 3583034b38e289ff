"""Free ports, and the processes that hold ports in use."""

import contextlib
import errno
import ipaddress
import random
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

TRITON_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
DEFAULT_PORTS = {**TRITON_PORTS, "openai": 8003}
FREE_PORTS = dict.fromkeys(TRITON_PORTS, 0)  # 0: chosen at the start
_HIGHEST = 65535
_LOWEST, _TRIES = 10_000, 1000  # lowest port to pick, and number of attempts
_LISTEN = "0A"  # state column of /proc/net/tcp
# The command line of a module that `checkout_program` starts.
_CHECKOUT_PROGRAM = re.compile(r"-c .*; from (\S+) import main; sys.exit\(main\(\)\)")


class TakenPort(str):
    """The reason that a port is in use by another process."""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(host: str, port: int) -> str:
    """Return `host:port` as in URLs, with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def free_ports(host: str, count: int) -> Iterator[list[int]]:
    """Yield `count` different free ports on `host`, reserved until the block ends.

    A server can listen on them: both sockets set SO_REUSEADDR, and the reserving one does not
    listen. They lie below the ports that the kernel uses for outgoing connections.
    """
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")  # ip(7)
    wanted = list(range(_LOWEST, int(ephemeral.split()[0])))
    random.shuffle(wanted)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        # The kernel's choice (port 0) comes last, for machines whose ephemeral range begins lower.
        for port in [*wanted[:_TRIES], *[0] * count]:
            if len(found) == count:
                break
            probe = stack.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                # Only after bind, which thus fails at a port that another process has reserved.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.append(int(probe.getsockname()[1]))
        if len(found) < count:
            raise OSError(errno.EADDRINUSE, f"no {count} ports are free on {host}")
        yield found


def pick_free_ports(host: str, count: int) -> list[int]:
    """Return `count` different ports that are free on `host` now, without reserving them."""
    with free_ports(host, count) as ports:
        return ports


def port_problem(host: str, port: int) -> str | None:
    """Return why a server cannot listen on `host`:`port`, with the port's holder if visible."""
    if not 0 <= port <= _HIGHEST:
        return f"is not a port, which are 0 to {_HIGHEST}"
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # Servers set this too: old connections in TIME_WAIT do not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return TakenPort(f"is in use{_holder_text(port)}")
            if error.errno == errno.EACCES:
                return "may not be opened by this user (ports below 1024 are reserved)"
            return f"cannot be opened on {host}: {error.strerror}"
    return None


def ports_problems(
    host: str, ports: Mapping[str, int], *, keys: Mapping[str, str], is_here: bool = True
) -> list[str]:
    """Return a message if a server cannot listen on `host`, or one for every unavailable port.

    Port 0 means any free port. `keys` are the configuration keys of the ports and of `host`, which
    is an address or a name. Without `is_here` the server runs on another machine: then only the
    name is checked, and that the ports differ.
    """
    if not _may_be_host(host):
        return [f"{keys['host']}={host} is neither an address nor the name of a host."]
    if is_here and (problem := port_problem(host, 0)):
        return [
            f"{keys['host']}={host}: ports {problem}; give an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
        ]
    wanted = {keys[name]: port for name, port in ports.items() if port}
    found = [
        f"{key}={port} {problem}; choose another, or 0 for any free port."
        for key, port in (wanted.items() if is_here else ())
        if (problem := port_problem(host, port))
    ]
    if len(set(wanted.values())) < len(wanted):
        pairs = ", ".join(f"{key}={port}" for key, port in wanted.items())
        found.append(f"{pairs}: the ports must differ; 0 takes any free one.")
    return found


def _may_be_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    is_name = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", text)
    return is_name is not None and re.fullmatch(r"[0-9.]+", text) is None


def _holder_text(port: int) -> str:
    """Return which process listens on a port, "" if this user cannot see it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{columns[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or one that just ended
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").split()
                command = b" ".join(words).decode(errors="replace")
                command = _CHECKOUT_PROGRAM.sub(r"-m \1", command)[:100]
                return f" by process {process.name} ({command})"
    return ""
