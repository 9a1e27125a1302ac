"""What a transport has to do to be one, as checks that anybody can run against their own; see conformance.py."""

from tensorhub_plugins.core.testing.conformance import Report, TransportSuite, check_transport
from tensorhub_plugins.core.testing.material import ConformanceError, blank_like, sample_tensors
from tensorhub_plugins.core.testing.peers import SimpleShelf

__all__ = [
    "ConformanceError",
    "Report",
    "SimpleShelf",
    "TransportSuite",
    "blank_like",
    "check_transport",
    "sample_tensors",
]
