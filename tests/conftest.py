"""What every test runs under."""

import os

from hypothesis import settings

# a run of CI must say the same twice; elsewhere hypothesis looks for new examples each time
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
