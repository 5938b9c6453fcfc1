"""The version, below everything that writes it into a file."""

from importlib.metadata import PackageNotFoundError, version

FALLBACK = "0.2.0.dev0"
"""Of a checkout that was never installed, and of an archive without git (``pyproject.toml`` has the same)."""

try:
    __version__ = version("embedlab")
except PackageNotFoundError:
    __version__ = FALLBACK
