"""The front as a process of its owner, which outlives the server behind it by taking another."""

import contextlib
import os
import sys
import threading
from pathlib import Path

from inference.front.link import LEFT, FrontSettings, Readiness, Served
from inference.parent_process import end_process
from inference.server.process import LinkedProcess

_END_S = 5.0  # for the last answers to be sent


class FrontProcess(LinkedProcess):
    """A front, started; it ends with this process.

    At SIGTERM it takes no more requests, and ends once it has answered those that it has.
    """

    def __init__(self, settings: FrontSettings, *, log_path: Path) -> None:
        self._sending = threading.Lock()
        self._serves: set[str] = set()  # folders of sockets
        # The checkout that this process runs, wherever it was started.
        checkout = Path(__file__).resolve().parents[2]
        program = (sys.executable, "-m", "inference.front")
        super().__init__(program, log_path=log_path, cwd=checkout)
        self.send(settings)

    def serves(self, sockets: Path) -> bool:
        """Return whether it passes requests on to a server, or still has some of them there."""
        with contextlib.suppress(EOFError, OSError):
            while self.link.poll():
                event, _, folder = os.fsdecode(self.link.recv_bytes()).partition(" ")
                (self._serves.discard if event == LEFT else self._serves.add)(folder)
        return self.poll() is None and str(sockets) in self._serves

    def send(self, record: FrontSettings | Served | Readiness) -> None:
        """Have it know a server's readiness, or pass new requests on to another server.

        `serves` shows when it does.
        """
        with self._sending, contextlib.suppress(OSError):  # its exit status reports its end
            self.link.send(record)

    def end(self) -> None:
        """End it, and wait for that."""
        self.link.close()
        end_process(self, grace_s=_END_S)
