"""The Lightning part: module, optimizers, callbacks and the run card."""
