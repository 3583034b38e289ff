"""The front as a process of its owner, which outlives the server behind it by taking another."""

import contextlib
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

from inference.front.link import LEFT, FrontSettings, Readiness, Served
from inference.parent_process import end_process

_END_S = 5.0  # for the last answers to be sent


class FrontProcess(subprocess.Popen[bytes]):
    """A front, started; it ends with this process.

    At SIGTERM it takes no more requests, and ends once it has answered those that it has.
    """

    def __init__(self, settings: FrontSettings, *, log_path: Path) -> None:
        self._link, other = Pipe()
        self._sending = threading.Lock()
        self._serves: set[str] = set()  # folders of sockets
        with other, log_path.open("ab") as log:
            super().__init__(
                [sys.executable, "-m", "inference.front", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The checkout that this process runs, wherever it was started.
                cwd=Path(__file__).resolve().parents[2],
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.send(settings)

    def serves(self, sockets: Path) -> bool:
        """Return whether it passes requests on to a server, or still has some of them there."""
        with contextlib.suppress(EOFError, OSError):
            while self._link.poll():
                event, _, folder = os.fsdecode(self._link.recv_bytes()).partition(" ")
                (self._serves.discard if event == LEFT else self._serves.add)(folder)
        return self.poll() is None and str(sockets) in self._serves

    def send(self, record: FrontSettings | Served | Readiness) -> None:
        """Have it know a server's readiness, or pass new requests on to another server.

        `serves` shows when it does.
        """
        with self._sending, contextlib.suppress(OSError):  # its exit status reports its end
            self._link.send(record)

    def end(self) -> None:
        """End it, and wait for that."""
        self._link.close()
        end_process(self, grace_s=_END_S)
