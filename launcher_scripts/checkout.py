"""Where this checkout lies, and the configuration files in it."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
CONFIG_DIR = CHECKOUT / "conf"
