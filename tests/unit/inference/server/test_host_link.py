"""The owner's end of the connection to a server."""

import json
from multiprocessing import Pipe

from inference.server.server import HostLink


def test_models_that_still_load_are_shown_until_the_last():
    own, other = Pipe()
    link = HostLink(own)
    for line in ("loading engine", "loading texts", "loaded texts", "loaded engine"):
        other.send_bytes(json.dumps({"says": line}).encode())
    other.close()
    link.read_all()
    engine, both = "loading engine", "loading engine, texts"
    assert link.progress_lines() == [engine, both, engine, "loaded engine"]
