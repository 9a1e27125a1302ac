"""The requirements of a transport, as checks that any author can run against their own; see conformance.py."""

from transport_suite.conformance import Report, TransportSuite, check_transport
from transport_suite.material import ConformanceError, blank_like, sample_tensors
from transport_suite.peers import SimpleShelf

__all__ = [
    "ConformanceError",
    "Report",
    "SimpleShelf",
    "TransportSuite",
    "blank_like",
    "check_transport",
    "sample_tensors",
]
