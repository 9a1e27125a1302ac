"""Limits of hubs that tests start."""

from tensorhub_plugins.core import HubLimits

# A new hub waits some seconds for workers that a former one knew; where there was none, a first version need not.
AT_ONCE = HubLimits(grace_s=0.0)
