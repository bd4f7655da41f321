"""GPU tests are collected only where the `cuda` extra is installed: `pip install -e .[cuda]`."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("cuda") is None else []
