"""What a transport has to do to be one, as checks that anybody can run against their own; see conformance.py."""

from tensorhub_plugins.core.testing.conformance import (
    ConformanceError,
    Report,
    SimpleShelf,
    TransportSuite,
    blank_like,
    check_transport,
    sample_tensors,
)

__all__ = [
    "ConformanceError",
    "Report",
    "SimpleShelf",
    "TransportSuite",
    "blank_like",
    "check_transport",
    "sample_tensors",
]
