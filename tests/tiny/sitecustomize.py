"""With this folder on the path, other processes train on the tests' tiny data set, too."""

import importlib.abc
import importlib.util
import sys


class Tiny(importlib.abc.MetaPathFinder):
    """Exchanges ``load`` once the lab's data are imported, by whoever imports them."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002
        if name != "mssar.lab.data":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.load = load

        spec.loader.exec_module = exec_module
        return spec


def load(name, data_dir=None):  # noqa: ARG001
    from lab import arrays

    return arrays(37, 24, 10)


sys.meta_path.insert(0, Tiny())
