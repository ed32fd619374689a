"""A plugin for pytest: loads the library that LLTM_LIBRARY names, before the package its own."""

import os

import torch

torch.ops.load_library(os.environ["LLTM_LIBRARY"])
