"""Settings for every test: the same inputs every time, and no verdict that depends on how busy the machine is."""

import hypothesis

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
