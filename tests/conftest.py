"""One thread per process: on two cores, OpenMP barriers make two threads several times slower. And no example of a
property test fails for being slow: that is the machine's affair. Examples are the same in every run, so that a change
is to blame for a failure; `HYPOTHESIS_PROFILE=explore` draws new ones."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
