"""The only importer of transformers: upstream's configuration, code, weights mapping, caches, masks and processors.

adapt, accept and serve never touch the network, so the hub client is put offline before anything imports it."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
