import os

# Before torch is imported: tests neither reach out to a model hub nor take all cores from each other.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# The same examples in every run, so that a change is judged by what it changes; HYPOTHESIS_PROFILE=explore
# looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
