"""For tests of what stands on a seam: ``fake``, a machine in the place of GPUs, and ``conformance``, which every transport passes.

No product code imports this room. It ships with crossfade, so that a transport that is not here can be tested by the same suite.
"""
